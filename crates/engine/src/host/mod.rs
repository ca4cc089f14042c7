//! Host memory: maps reserved exactly, touched in parallel, pinned where the device can, and handed out
//! as [`Region`]s. A region is the only owner of its bytes; who needs them during a transfer gives the
//! region to the transfer and gets it back when that is over (see [`crate::device::Ticket`]).

mod arena;
mod region;
mod slab;

pub use arena::{Arena, Pin, Usage};
pub use region::{Plain, Region};
pub use slab::Pinner;
