//! The worker: one thread that runs queued jobs in order, each job's arithmetic on the pool.
//!
//! Jobs are numbered; who needs the effect of job n waits until n are done. The first error stops the
//! worker for good: later jobs are dropped and every later call is told.

#![forbid(unsafe_code)]

mod clip;
mod job;
mod queue;

pub use clip::{Clip, Verdict};
pub use job::{Entry, Job, Part, Shared};
pub use queue::{Queue, Waited};
