//! Hands out exact ranges from slabs and keeps count of what is pinned.
//!
//! A pin that fails is not the end: with [`Pin::Auto`] this slab and all later ones stay pageable, one
//! event says so, and training goes on (slower copies). [`Pin::Always`] turns it into an error.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use crate::error::{Error, Result};

use super::region::{ALIGN, Region};
use super::slab::{Counters, Pinner, Slab};

/// Slabs are closed at this size; a larger range gets one of its own.
const SLAB_BYTES: usize = 1 << 30;

/// Whether host memory is page-locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pin {
    /// Pin, and fall back to pageable memory where the driver refuses.
    Auto,
    /// Pin, and fail where the driver refuses.
    Always,
    /// Never pin.
    Never,
}

/// Bytes that an arena holds, as mapped (whole pages).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Page-locked bytes.
    pub pinned: usize,
    /// Bytes left pageable.
    pub pageable: usize,
}

/// Reserves memory for regions.
#[derive(Debug)]
pub struct Arena {
    pinner: Option<Arc<dyn Pinner>>,
    policy: Pin,
    counters: Arc<Counters>,
    refusal: Mutex<Option<Error>>,
}

impl Arena {
    /// An arena whose slabs are pinned by `pinner`, if there is one, under `policy`.
    pub fn new(pinner: Option<Arc<dyn Pinner>>, policy: Pin) -> Self {
        Arena { pinner, policy, counters: Arc::default(), refusal: Mutex::default() }
    }

    /// One zeroed region per entry of `sizes` (bytes), touched by the threads of `pool`.
    ///
    /// # Errors
    /// [`Error::OutOfHostMemory`] when a map is refused; [`Error::Pin`] under [`Pin::Always`].
    pub fn reserve(&self, sizes: &[usize], pool: &rayon::ThreadPool) -> Result<Vec<Region>> {
        let mut regions = Vec::with_capacity(sizes.len());
        let mut rest = sizes;
        while !rest.is_empty() {
            let (count, bytes) = fill_slab(rest);
            let slab = Arc::new(self.slab(bytes, pool)?);
            let mut offset = 0;
            for &size in &rest[..count] {
                // SAFETY: `fill_slab` summed these rounded sizes, so the ranges are disjoint and in bounds.
                regions.push(unsafe { Region::new(Arc::clone(&slab), offset, size) });
                offset += size.next_multiple_of(ALIGN);
            }
            rest = &rest[count..];
        }
        Ok(regions)
    }

    /// One region of `bytes`.
    pub fn reserve_one(&self, bytes: usize, pool: &rayon::ThreadPool) -> Result<Region> {
        Ok(self.reserve(&[bytes], pool)?.remove(0))
    }

    /// Bytes held now. A slab goes back to the system when its last region drops.
    pub fn usage(&self) -> Usage {
        Usage { pinned: self.counters.pinned.load(Relaxed), pageable: self.counters.pageable.load(Relaxed) }
    }

    /// The refusal that made this arena fall back to pageable memory.
    pub fn refusal(&self) -> Option<Error> {
        self.lock().clone()
    }

    fn slab(&self, bytes: usize, pool: &rayon::ThreadPool) -> Result<Slab> {
        let mut slab = Slab::reserve(bytes, &self.counters, pool)?;
        let mut refusal = self.lock();
        let pinner = self.pinner.as_ref().filter(|_| self.policy != Pin::Never && refusal.is_none());
        if let Some(Err(why)) = pinner.map(|p| slab.pin(p)) {
            let error = Error::Pin { bytes: slab.bytes(), pinned: self.usage().pinned, why };
            if self.policy == Pin::Always {
                return Err(error);
            }
            *refusal = Some(error);
        }
        Ok(slab)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Error>> {
        self.refusal.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// How many of `sizes` go into the next slab, and its bytes.
fn fill_slab(sizes: &[usize]) -> (usize, usize) {
    let (mut count, mut bytes) = (0, 0);
    for &size in sizes {
        let grown = bytes + size.next_multiple_of(ALIGN);
        if count > 0 && grown > SLAB_BYTES {
            break;
        }
        (count, bytes) = (count + 1, grown);
    }
    (count, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool() -> rayon::ThreadPool {
        crate::threads::pool(2).unwrap()
    }

    #[derive(Debug)]
    struct Refuses(usize, Mutex<usize>);
    impl Pinner for Refuses {
        fn pin(&self, _: *mut u8, bytes: usize) -> Result<(), String> {
            let mut pinned = self.1.lock().unwrap();
            if *pinned + bytes > self.0 {
                return Err("limit".into());
            }
            *pinned += bytes;
            Ok(())
        }
        fn unpin(&self, _: *mut u8) {}
    }

    #[test]
    fn ranges_are_exact_aligned_and_disjoint() {
        let arena = Arena::new(None, Pin::Never);
        let sizes = [1, 64, 65, 0, 4096, 100_003];
        let mut regions = arena.reserve(&sizes, &pool()).unwrap();
        for (i, r) in regions.iter_mut().enumerate() {
            assert_eq!(r.bytes(), sizes[i]);
            assert_eq!(r.as_ptr() as usize % ALIGN, 0);
            assert!(r.as_slice::<u8>().iter().all(|&b| b == 0));
            r.as_mut_slice::<u8>().fill(i as u8 + 1);
        }
        for (i, r) in regions.iter().enumerate() {
            assert!(r.as_slice::<u8>().iter().all(|&b| b == i as u8 + 1), "region {i} was overwritten");
        }
    }

    /// BUGS B48: nothing is rounded up to a power of two.
    #[test]
    fn reserved_bytes_stay_within_two_per_cent() {
        for k in 20..28 {
            let arena = Arena::new(None, Pin::Never);
            let asked = (1usize << k) + 1;
            let _held = arena.reserve_one(asked, &pool()).unwrap();
            assert!(arena.usage().pageable as f64 <= 1.02 * asked as f64);
        }
    }

    /// BUGS B49: a refused pin leaves the rest pageable, or is an error if the user insists.
    #[test]
    fn a_refused_pin_falls_back_or_fails() {
        let sizes = [SLAB_BYTES / 512; 1024]; // two slabs
        let refuses = || Some(Arc::new(Refuses(SLAB_BYTES, Mutex::new(0))) as Arc<dyn Pinner>);
        let arena = Arena::new(refuses(), Pin::Auto);
        let held = arena.reserve(&sizes, &pool()).unwrap();
        assert_eq!(arena.usage(), Usage { pinned: SLAB_BYTES, pageable: SLAB_BYTES });
        assert!(matches!(arena.refusal(), Some(Error::Pin { pinned: SLAB_BYTES, .. })));
        drop(held);
        assert_eq!(arena.usage(), Usage::default(), "everything goes back");

        let arena = Arena::new(refuses(), Pin::Always);
        assert!(matches!(arena.reserve(&sizes, &pool()), Err(Error::Pin { .. })));
        assert_eq!(Arena::new(refuses(), Pin::Never).refusal().map(|e| e.to_string()), None);
    }
}
