//! What the worker does: add a gradient to the one that is there, take its norm, or update a bucket of parameters.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Clip, Verdict};
use crate::device::{Completion, Device, DeviceRange, Fence, Ticket};
use crate::error::Result;
use crate::host::{Arena, Region};
use crate::optim::{Consts, Hyper, Level, update_all};
use crate::stats::{Stats, Work};
use crate::store::Slot;
use crate::trace::Lane;

/// A slot and what its users must know without locking it.
#[derive(Debug)]
pub struct Entry {
    /// Its place among the slots.
    number: usize,
    /// Number of the last job that updates the slot.
    pub update_job: AtomicU64,
    /// The last upload of its weights.
    pub uploaded: Mutex<Option<Arc<dyn Completion>>>,
    slot: Mutex<Slot>,
}

impl Entry {
    /// An entry nobody waits for.
    pub fn new(number: usize, slot: Slot) -> Self {
        Entry { number, update_job: AtomicU64::new(0), uploaded: Mutex::new(None), slot: Mutex::new(slot) }
    }

    /// Its place among the slots.
    pub fn number(&self) -> usize {
        self.number
    }

    /// The slot; waits for a worker that has it.
    pub fn lock(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues the upload of this slot's weights.
    pub fn send(&self, slot: &mut Slot, shared: &Shared, weight: DeviceRange, after: &Fence) -> Result<()> {
        Stats::add(&shared.stats.bytes_in, weight.bytes());
        let completion = slot.upload().send(|region| shared.device.copy_in(region, weight, after))?;
        let copy = Arc::clone(&completion);
        shared.stats.trace.copy("weight", Lane::In, move || copy.is_done());
        *self.uploaded.lock().unwrap_or_else(PoisonError::into_inner) = Some(completion);
        Ok(())
    }
}

/// What jobs work with.
#[derive(Debug)]
pub struct Shared {
    /// Where weights go and gradients come from.
    pub device: Arc<dyn Device>,
    /// Where host memory comes from.
    pub arena: Arena,
    /// Threads of the arithmetic.
    pub pool: rayon::ThreadPool,
    /// Instruction set of the arithmetic.
    pub level: Level,
    /// Counters.
    pub stats: Stats,
    /// Staging regions that no gradient uses.
    pub staging: Mutex<Vec<Region>>,
}

impl Shared {
    /// A staging region of at least `bytes`, and the smallest such.
    pub fn take_staging(&self, bytes: usize) -> Result<Region> {
        let mut idle = self.idle_staging();
        let best = (0..idle.len()).filter(|&i| idle[i].bytes() >= bytes).min_by_key(|&i| idle[i].bytes());
        match best {
            Some(i) => Ok(idle.swap_remove(i)),
            None => {
                drop(idle);
                self.arena.reserve_one(bytes, &self.pool)
            }
        }
    }

    /// Idle staging regions.
    pub fn idle_staging(&self) -> MutexGuard<'_, Vec<Region>> {
        self.staging.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a staging region back.
    pub fn give_staging(&self, mut region: Region) {
        if self.device.faults().is_some_and(|f| f.poisons()) {
            region.poison();
        }
        self.idle_staging().push(region);
    }
}

/// One parameter of an update.
#[derive(Debug)]
pub struct Part {
    /// Its slot.
    pub entry: Arc<Entry>,
    /// Its weight on the device.
    pub weight: DeviceRange,
    /// Hyper-parameters in force at `step()`.
    pub hyper: Hyper,
    /// Factor of its gradient.
    pub scale: f64,
}

/// One unit of the worker.
#[derive(Debug)]
pub enum Job {
    /// Adds an arriving gradient, unless its generation is over.
    Accumulate {
        /// The slot to add to.
        entry: Arc<Entry>,
        /// The gradient on its way.
        addend: Ticket,
        /// Generation of the gradient that it belongs to.
        generation: u64,
    },
    /// Takes the norm of an arriving gradient, unless its generation is over.
    Measure {
        /// Its slot.
        entry: Arc<Entry>,
        /// Its generation.
        generation: u64,
    },
    /// Decides what the norm of these gradients means for the updates behind it.
    Clip {
        /// Where the updates look.
        clip: Arc<Clip>,
        /// The slots, and the factors of their gradients.
        gradients: Vec<(Arc<Entry>, f64)>,
    },
    /// Updates a bucket of parameters and sends their weights.
    Update {
        /// The parameters.
        parts: Vec<Part>,
        /// What the device had queued at `step()`: it may still read the old weights.
        fence: Fence,
        /// What may scale the gradients or forbid the update.
        clip: Option<Arc<Clip>>,
    },
}

impl Job {
    /// For messages.
    pub fn name(&self) -> &'static str {
        match self {
            Job::Accumulate { .. } => "accumulate",
            Job::Measure { .. } => "measure",
            Job::Clip { .. } => "clip",
            Job::Update { .. } => "update",
        }
    }

    pub(super) fn run(self, shared: &Shared) -> Result<()> {
        if let Some(faults) = shared.device.faults() {
            faults.job();
        }
        shared.stats.trace.look();
        match self {
            Job::Accumulate { entry, addend, generation } => {
                let (addend, outcome) = shared.stats.timed(Work::WaitGradients, || addend.wait());
                outcome?;
                let mut slot = entry.lock();
                if slot.generation == generation {
                    shared.stats.timed(Work::Accumulate, || {
                        slot.add_gradient(shared.level, &addend, &shared.arena, &shared.pool)
                    })?;
                }
                drop(slot);
                shared.give_staging(addend);
                Ok(())
            }
            Job::Measure { entry, generation } => {
                let mut slot = entry.lock();
                if slot.generation == generation {
                    slot.squares(shared.level, &shared.pool, &shared.stats)?;
                }
                Ok(())
            }
            Job::Clip { clip, gradients } => clip.decide(shared, gradients),
            Job::Update { parts, fence, clip } => match clip.map_or(Verdict::Scale(1.0), |clip| clip.verdict()) {
                Verdict::Scale(scale) => update_bucket(shared, &parts, &fence, scale),
                Verdict::Skip => Ok(()),
            },
        }
    }
}

/// Updates the parts and sends their weights.
fn update_bucket(shared: &Shared, parts: &[Part], fence: &Fence, scale: f64) -> Result<()> {
    let mut slots: Vec<_> = parts.iter().map(|part| part.entry.lock()).collect();
    // Thousands of small parameters share their constants.
    let mut consts: Vec<Consts> = Vec::new();
    let mut last = None;
    let mut which = Vec::with_capacity(parts.len());
    for (slot, part) in slots.iter().zip(parts) {
        let key = (part.hyper, slot.step + 1, part.scale);
        if last != Some(key) {
            consts.push(Consts::new(&part.hyper, slot.step + 1, scale * part.scale));
            last = Some(key);
        }
        which.push(consts.len() - 1);
    }
    let mut work = Vec::with_capacity(parts.len());
    for (slot, which) in slots.iter_mut().zip(which) {
        let chunk = shared.stats.timed(Work::WaitGradients, || slot.chunk())?;
        work.push((chunk, &consts[which]));
    }
    shared.stats.timed(Work::Update, || update_all(&shared.pool, shared.level, work));
    for (slot, part) in slots.iter_mut().zip(parts) {
        slot.step += 1;
        part.entry.send(slot, shared, part.weight, fence)?;
    }
    Ok(())
}
