//! An owned, aligned range of host memory.

use std::fmt;
use std::sync::Arc;

use super::slab::Slab;

mod sealed {
    pub trait Sealed {}
    impl Sealed for u8 {}
    impl Sealed for u16 {}
    impl Sealed for f32 {}
}

/// Element types for which every bit pattern is a value.
pub trait Plain: sealed::Sealed + Copy + Send + Sync + 'static {}
impl Plain for u8 {}
impl Plain for u16 {}
impl Plain for f32 {}

/// Start of every region: a cache line, and the width of the widest vector.
pub(super) const ALIGN: usize = 64;

/// The only owner of `bytes` host bytes, zeroed when new and aligned to 64.
///
/// It keeps its slab mapped (and pinned) for as long as it lives.
pub struct Region {
    /// Keeps the memory mapped.
    _slab: Arc<Slab>,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: the region is the only owner of its range, like a `Box<[u8]>`.
unsafe impl Send for Region {}
// SAFETY: shared access only reads.
unsafe impl Sync for Region {}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("start", &self.start).field("bytes", &self.bytes).finish()
    }
}

impl Region {
    /// # Safety
    /// `offset..offset + bytes` lies in the slab and belongs to no other region; `offset` is a multiple of [`ALIGN`].
    pub(super) unsafe fn new(slab: Arc<Slab>, offset: usize, bytes: usize) -> Self {
        debug_assert!(offset.is_multiple_of(ALIGN) && offset + bytes <= slab.bytes());
        // SAFETY: in bounds by the caller's contract.
        let start = unsafe { slab.start().add(offset) };
        Region { _slab: slab, start, bytes }
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// First byte, for handing to a driver. The region must outlive the transfer: give it to the ticket.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// The bytes as elements; trailing bytes that do not fill one are left out.
    pub fn as_slice<T: Plain>(&self) -> &[T] {
        // SAFETY: aligned to 64, initialised (zeroed map), every bit pattern is a `T`, and `&self` excludes writers.
        unsafe { std::slice::from_raw_parts(self.start.cast(), self.bytes / size_of::<T>()) }
    }

    /// As [`Region::as_slice`], to write.
    pub fn as_mut_slice<T: Plain>(&mut self) -> &mut [T] {
        // SAFETY: as in `as_slice`; `&mut self` makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), self.bytes / size_of::<T>()) }
    }

    /// Fills the region with 0xFF: NaN in every element type. For tests that hunt stale reads.
    pub fn poison(&mut self) {
        self.as_mut_slice::<u8>().fill(0xFF);
    }
}
