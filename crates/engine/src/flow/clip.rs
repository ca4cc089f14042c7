//! Clipping by the global norm: one job decides, the updates behind it obey.

use std::sync::{Arc, OnceLock, PoisonError};

use super::{Entry, Shared};
use crate::error::Result;
use crate::stats::Stats;

/// What a norm says about an update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Verdict {
    /// Multiply the gradients by this.
    Scale(f64),
    /// A gradient is infinite or not a number: leave weights and state alone.
    Skip,
}

/// The clipping of one step.
#[derive(Debug)]
pub struct Clip {
    max_norm: f64,
    verdict: OnceLock<Verdict>,
}

impl Clip {
    /// Clips to `max_norm`; infinity only skips.
    pub fn new(max_norm: f64) -> Self {
        Clip { max_norm, verdict: OnceLock::new() }
    }

    /// Takes the norm over these gradients, each times its factor, whatever their order, and decides.
    pub(super) fn decide(&self, shared: &Shared, mut gradients: Vec<(Arc<Entry>, f64)>) -> Result<()> {
        gradients.sort_by_key(|(entry, _)| entry.number());
        let mut squares = 0.0;
        for (entry, scale) in gradients {
            squares += scale * scale * entry.lock().squares(shared.level, &shared.pool, &shared.stats)?;
        }
        let norm = squares.sqrt();
        // torch's factor, so that clipped gradients are torch's.
        let verdict = match norm.is_finite() {
            true => Verdict::Scale((self.max_norm / (norm + 1e-6)).min(1.0)),
            false => Verdict::Skip,
        };
        *shared.stats.grad_norm.lock().unwrap_or_else(PoisonError::into_inner) = Some(norm);
        Stats::add(&shared.stats.skipped_steps, usize::from(verdict == Verdict::Skip));
        self.verdict.get_or_init(|| verdict);
        Ok(())
    }

    /// What was decided.
    pub(super) fn verdict(&self) -> Verdict {
        *self.verdict.get().expect("decided by an earlier job")
    }
}
