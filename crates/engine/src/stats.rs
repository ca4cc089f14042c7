//! Counters that every layer may add to: where bytes went and where time was spent.

#![forbid(unsafe_code)]

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::trace::{Lane, Trace};

/// What time was spent on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Worker: arithmetic of the updates.
    Update,
    /// Worker: adding gradients up and measuring their norm.
    Accumulate,
    /// Worker: waiting for gradients to arrive.
    WaitGradients,
    /// Caller: waiting for the worker, be it for a weight, a gradient's place or a norm (exposed time).
    WaitUpdate,
    /// Caller: waiting because too many gradients are on their way.
    WaitInflight,
}

impl Work {
    /// All of them.
    pub const ALL: [Work; 5] =
        [Work::Update, Work::Accumulate, Work::WaitGradients, Work::WaitUpdate, Work::WaitInflight];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Work::Update => "update",
            Work::Accumulate => "accumulate",
            Work::WaitGradients => "wait_gradients",
            Work::WaitUpdate => "wait_update",
            Work::WaitInflight => "wait_inflight",
        }
    }

    fn lane(self) -> Lane {
        match self {
            Work::Update | Work::Accumulate | Work::WaitGradients => Lane::Worker,
            Work::WaitUpdate | Work::WaitInflight => Lane::Caller,
        }
    }
}

/// Totals since the engine was built. Sizes in bytes.
#[derive(Debug, Default)]
pub struct Stats {
    nanoseconds: [AtomicU64; Work::ALL.len()],
    /// Bytes copied from the device.
    pub bytes_out: AtomicU64,
    /// Bytes copied to the device.
    pub bytes_in: AtomicU64,
    /// Steps that updated something.
    pub steps: AtomicU64,
    /// Those of them that changed nothing, because the norm was not finite.
    pub skipped_steps: AtomicU64,
    /// The last global norm of the gradients, before clipping.
    pub grad_norm: Mutex<Option<f64>>,
    /// What happened when, if somebody wants to know.
    pub trace: Trace,
}

impl Stats {
    /// Adds to a counter.
    pub fn add(counter: &AtomicU64, amount: usize) {
        counter.fetch_add(amount as u64, Relaxed);
    }

    /// Runs `f` and notes its wall time.
    pub fn timed<T>(&self, work: Work, f: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let out = f();
        let end = Instant::now();
        self.nanoseconds[work as usize].fetch_add((end - start).as_nanos() as u64, Relaxed);
        self.trace.add(work.name(), work.lane(), start, end);
        out
    }

    /// Wall time spent so far.
    pub fn spent(&self, work: Work) -> Duration {
        Duration::from_nanos(self.nanoseconds[work as usize].load(Relaxed))
    }
}
