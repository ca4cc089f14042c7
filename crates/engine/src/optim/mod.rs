//! AdamW as arithmetic over slices, with no device in sight.
//!
//! * [`adamw`]: the hyperparameters, the constants of one step and the update of one chunk;
//! * [`convert`]: what a kernel reads and writes, and the plain conversions between element types;
//! * `kernels`: one generic loop, instantiated per instruction set; the only `unsafe` of this room.
//!
//! Invariant: every [`Level`] gives the same bytes, wherever a slice is split into chunks. Only the sign and
//! payload of a NaN are unspecified.

pub mod adamw;
pub mod convert;
mod kernels;

pub use adamw::{Chunk, Consts, Hyper, update};
pub use convert::{Source, Target, accumulate, narrow, widen};
pub use kernels::Level;

#[cfg(test)]
mod tests;
