//! AdamW as arithmetic over slices, with no device in sight.
//!
//! * [`adamw`]: the hyperparameters, the constants of one step and the update of one chunk;
//! * [`layout`]: the forms that weights and moments are kept in;
//! * [`noise`]: random bits for stochastic rounding, from a counter;
//! * [`convert`]: element types, conversions between them, and sums over them;
//! * [`parallel`]: the same on all threads of a pool;
//! * `kernels`: one generic loop, instantiated per instruction set; the only `unsafe` of this room.
//!
//! Invariant: every [`Level`] gives the same bytes, wherever a slice is split into chunks. Only the sign and
//! payload of a NaN are unspecified.

pub mod adamw;
pub mod convert;
mod kernels;
pub mod layout;
pub mod noise;
pub mod parallel;

pub use adamw::{Consts, Hyper, probe, update};
pub use convert::{Source, Target, accumulate, narrow, quiet, read_probe, squares, widen};
pub use kernels::Level;
pub use layout::{Chunk, Moments, Slices, Weights, join, split};
pub use noise::Noise;
pub use parallel::{accumulate_all, each_piece, squares_all, update_all};

#[cfg(test)]
mod tests;
