//! Counters that every layer may add to: where bytes went and where time was spent.

#![forbid(unsafe_code)]

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// Totals since the engine was built. Times in nanoseconds, sizes in bytes.
#[derive(Debug, Default)]
pub struct Stats {
    /// Worker: arithmetic of the updates.
    pub update_ns: AtomicU64,
    /// Worker: adding gradients up and measuring their norm.
    pub accumulate_ns: AtomicU64,
    /// Worker: waiting for gradients to arrive.
    pub wait_gradients_ns: AtomicU64,
    /// Caller: waiting for an update before using a weight (exposed time).
    pub wait_update_ns: AtomicU64,
    /// Bytes copied from the device.
    pub bytes_out: AtomicU64,
    /// Bytes copied to the device.
    pub bytes_in: AtomicU64,
    /// Calls of `step` that updated something.
    pub steps: AtomicU64,
    /// Those of them that changed nothing, because the norm was not finite.
    pub skipped_steps: AtomicU64,
    /// The last global norm of the gradients, before clipping.
    pub grad_norm: Mutex<Option<f64>>,
}

impl Stats {
    /// Adds to a counter.
    pub fn add(counter: &AtomicU64, amount: usize) {
        counter.fetch_add(amount as u64, Relaxed);
    }

    /// Runs `f` and adds its wall time to `counter`.
    pub fn timed<T>(counter: &AtomicU64, f: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let out = f();
        counter.fetch_add(start.elapsed().as_nanos() as u64, Relaxed);
        out
    }
}
