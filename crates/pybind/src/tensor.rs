//! Addresses from `trainstream.bridge` become ranges and slices here, and nowhere else.
//!
//! Contract for every function: the caller is `bridge.py`, which passes the `data_ptr()` and the byte count
//! of a contiguous tensor that it keeps alive, and that no one else writes, until the call (for slices)
//! or the transfer (for ranges) is over.

use trainstream_engine::device::DeviceRange;

/// Device memory of a tensor.
pub(crate) fn range(address: u64, bytes: usize) -> DeviceRange {
    // SAFETY: the contract above.
    unsafe { DeviceRange::new(address, bytes) }
}

/// Elements of a contiguous CPU fp32 tensor, to read.
pub(crate) fn floats<'a>(address: u64, numel: usize) -> &'a [f32] {
    if numel == 0 {
        return &[];
    }
    // SAFETY: the contract above; torch aligns its storage, and `bridge.py` makes offset views contiguous copies.
    unsafe { std::slice::from_raw_parts(address as *const f32, numel) }
}

/// Elements of a contiguous CPU fp32 tensor, to write.
pub(crate) fn floats_mut<'a>(address: u64, numel: usize) -> &'a mut [f32] {
    if numel == 0 {
        return &mut [];
    }
    // SAFETY: as in `floats`.
    unsafe { std::slice::from_raw_parts_mut(address as *mut f32, numel) }
}

/// Fills host memory with 0xFF.
pub(crate) fn poison(address: u64, bytes: usize) {
    // SAFETY: the contract above; only called for memory of the host device that its owner gives up.
    unsafe { std::ptr::write_bytes(address as *mut u8, 0xFF, bytes) };
}
