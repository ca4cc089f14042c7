//! What a host device under test does wrong, and when.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Injected faults. The default injects none.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// Seed of the random delays.
    pub seed: u64,
    /// Each copy and each worker job first sleeps a random time up to this many microseconds.
    pub max_delay_us: u64,
    /// Memory that is given back is filled with 0xFF at once.
    pub poison: bool,
    /// The n-th copy (from 0) fails.
    pub fail_copy: Option<u64>,
    /// Pinning fails once this many bytes are pinned.
    pub pin_limit: Option<u64>,
    /// The n-th worker job (from 0) panics.
    pub panic_job: Option<u64>,
}

/// Faults, and how far they have come.
#[derive(Debug, Default)]
pub struct Injector {
    pub(super) faults: Faults,
    draws: AtomicU64,
    copies: AtomicU64,
    jobs: AtomicU64,
}

impl Injector {
    pub(super) fn new(faults: Faults) -> Self {
        Injector { faults, ..Injector::default() }
    }

    /// Whether memory that is given back is to be poisoned.
    pub fn poisons(&self) -> bool {
        self.faults.poison
    }

    /// Sleeps a random time; splitmix64 of the seed and the number of the draw.
    pub(crate) fn delay(&self) {
        if self.faults.max_delay_us == 0 {
            return;
        }
        let draw = self.draws.fetch_add(1, Relaxed);
        let mut z = self.faults.seed.wrapping_add(draw.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        // Half of them not at all: races need fast neighbours as well as slow ones.
        if z & 1 == 0 {
            std::thread::sleep(Duration::from_micros((z >> 1) % self.faults.max_delay_us));
        }
    }

    /// Whether the copy that starts now is the one to fail.
    pub(super) fn copy_fails(&self) -> bool {
        Some(self.copies.fetch_add(1, Relaxed)) == self.faults.fail_copy
    }

    /// Delays the job that starts now, or panics in it.
    pub(crate) fn job(&self) {
        self.delay();
        assert!(Some(self.jobs.fetch_add(1, Relaxed)) != self.faults.panic_job, "injected panic");
    }
}
