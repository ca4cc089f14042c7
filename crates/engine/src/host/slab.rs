//! One anonymous map: reserved, touched by all threads, then registered with the driver in one piece.
//! No range of an arena spans two slabs, so no copy can span two registrations.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use memmap2::MmapMut;
use rayon::prelude::*;

use crate::error::{Error, Result};

/// What page-locks memory for a device. Implementors undo it in `unpin` and never panic there.
pub trait Pinner: Send + Sync + fmt::Debug {
    /// Page-locks `bytes` from `start`; the driver's answer as text if it refuses.
    fn pin(&self, start: *mut u8, bytes: usize) -> Result<(), String>;
    /// Undoes [`Pinner::pin`] for the same start.
    fn unpin(&self, start: *mut u8);
}

const PAGE: usize = 4096;
/// Bytes one thread touches before it takes the next piece.
const TOUCH_PIECE: usize = 4 << 20;

/// Mapped bytes of the living slabs of one arena.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) pinned: AtomicUsize,
    pub(super) pageable: AtomicUsize,
}

pub(super) struct Slab {
    start: *mut u8,
    bytes: usize,
    pinner: Option<Arc<dyn Pinner>>,
    counters: Arc<Counters>,
    map: MmapMut,
}

// SAFETY: `start` points into `map`, which this slab owns until it drops; access goes through regions,
// each the only owner of its range.
unsafe impl Send for Slab {}
// SAFETY: as above; the slab itself is immutable after construction.
unsafe impl Sync for Slab {}

impl fmt::Debug for Slab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slab").field("bytes", &self.bytes).field("pinned", &self.pinner.is_some()).finish()
    }
}

impl Slab {
    /// Reserves and touches `bytes` (at least one page), zeroed.
    pub(super) fn reserve(bytes: usize, counters: &Arc<Counters>, pool: &rayon::ThreadPool) -> Result<Self> {
        let bytes = bytes.max(1).next_multiple_of(PAGE);
        let refused = |e: std::io::Error| Error::OutOfHostMemory { bytes, why: e.to_string() };
        let mut map = MmapMut::map_anon(bytes).map_err(refused)?;
        // Fewer faults, faster registration, fewer TLB misses in kernels with eight streams. A wish: may be refused.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        pool.install(|| {
            map.par_chunks_mut(TOUCH_PIECE).for_each(|piece| {
                for page in piece.chunks_mut(PAGE) {
                    // SAFETY: `page` is not empty. Volatile, or the store of a zero could be dropped.
                    unsafe { page.as_mut_ptr().write_volatile(0) };
                }
            });
        });
        counters.pageable.fetch_add(bytes, Relaxed);
        Ok(Slab { start: map.as_mut_ptr(), bytes, pinner: None, counters: Arc::clone(counters), map })
    }

    /// Page-locks the whole slab.
    pub(super) fn pin(&mut self, pinner: &Arc<dyn Pinner>) -> Result<(), String> {
        pinner.pin(self.start, self.bytes)?;
        // A child of fork must not pay copy-on-write for, or disturb, memory that the device reads.
        #[cfg(target_os = "linux")]
        let _ = self.map.advise(memmap2::Advice::DontFork);
        self.pinner = Some(Arc::clone(pinner));
        self.counters.pageable.fetch_sub(self.bytes, Relaxed);
        self.counters.pinned.fetch_add(self.bytes, Relaxed);
        Ok(())
    }

    pub(super) fn start(&self) -> *mut u8 {
        self.start
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        let counter = match &self.pinner {
            Some(pinner) => {
                pinner.unpin(self.start);
                &self.counters.pinned
            }
            None => &self.counters.pageable,
        };
        counter.fetch_sub(self.bytes, Relaxed);
    }
}
