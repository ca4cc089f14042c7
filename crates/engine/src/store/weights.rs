//! The weights of one parameter on the host, in the form its spec asks for.

use rayon::prelude::*;

use super::{Holding, Master, SlotSpec, source, target};
use crate::dtype::DType;
use crate::error::Result;
use crate::host::Region;
use crate::optim::parallel::PIECE;
use crate::optim::{self, Level, Source, Target, narrow, quiet, widen};

/// The one region that the device gets is a [`Holding`]: it may be away.
#[derive(Debug)]
pub(super) enum Weights {
    /// fp32 weights are their own master.
    Own(Holding),
    /// fp32 master, and the 16-bit weights rounded from it.
    Rounded { master: Region, wire: Holding },
    /// The two halves of an fp32 master; the high one is the weight.
    Split { high: Holding, low: Region },
    /// bfloat16 weights, no master.
    Bare(Holding),
}

impl Weights {
    /// Bytes of the regions that [`Weights::new`] takes, in its order.
    pub(super) fn sizes(spec: SlotSpec) -> Vec<usize> {
        let own = spec.weight.size() * spec.numel;
        match spec.master() {
            Master::None => vec![own],
            Master::Split => vec![own, own],
            Master::F32 if spec.weight == DType::F32 => vec![own],
            Master::F32 => vec![4 * spec.numel, own],
        }
    }

    pub(super) fn new(spec: SlotSpec, mut next: impl FnMut() -> Region) -> Self {
        match spec.master() {
            Master::None => Weights::Bare(next().into()),
            Master::Split => Weights::Split { high: next().into(), low: next() },
            Master::F32 if spec.weight == DType::F32 => Weights::Own(next().into()),
            Master::F32 => Weights::Rounded { master: next(), wire: next().into() },
        }
    }

    /// What the device gets.
    pub(super) fn upload(&mut self) -> &mut Holding {
        match self {
            Weights::Own(weight) | Weights::Bare(weight) => weight,
            Weights::Rounded { wire, .. } => wire,
            Weights::Split { high, .. } => high,
        }
    }

    /// For an update; waits for what is away.
    pub(super) fn chunk(&mut self, dtype: DType) -> Result<optim::Weights<'_>> {
        Ok(match self {
            Weights::Own(weight) => {
                optim::Weights::Master { master: weight.region()?.as_mut_slice(), weight: Target::None }
            }
            Weights::Rounded { master, wire } => {
                optim::Weights::Master { master: master.as_mut_slice(), weight: target(wire.region()?, dtype) }
            }
            Weights::Split { high, low } => {
                optim::Weights::Split { high: high.region()?.as_mut_slice(), low: low.as_mut_slice() }
            }
            Weights::Bare(weight) => optim::Weights::Bare(weight.region()?.as_mut_slice()),
        })
    }

    /// The master as fp32. A failed upload does not harm it.
    pub(super) fn read(&mut self, level: Level, to: &mut [f32]) {
        match self {
            Weights::Own(weight) => to.copy_from_slice(weight.settle().0.as_slice()),
            Weights::Rounded { master, .. } => to.copy_from_slice(master.as_slice()),
            Weights::Split { high, low } => optim::join(high.settle().0.as_slice(), low.as_slice(), to),
            Weights::Bare(weight) => widen(level, Source::Bf16(weight.settle().0.as_slice()), to),
        }
    }

    /// Replaces the master by fp32 values, rounded to nearest if there are only 16 bits.
    pub(super) fn write(&mut self, level: Level, from: &[f32]) {
        match self {
            Weights::Own(weight) => copy(from, weight.settle().0),
            Weights::Rounded { master, .. } => copy(from, master),
            Weights::Split { high, low } => {
                optim::split(from, high.settle().0.as_mut_slice(), low.as_mut_slice());
            }
            Weights::Bare(weight) => narrow(level, from, Target::Bf16(weight.settle().0.as_mut_slice())),
        }
    }

    /// Makes weights that came into [`Weights::upload`] the master.
    pub(super) fn adopt(&mut self, level: Level, dtype: DType) -> Result<()> {
        match self {
            Weights::Bare(_) => {}
            Weights::Own(weight) => quiet(weight.region()?.as_mut_slice()),
            Weights::Rounded { master, wire } => {
                widen(level, source(wire.region()?, dtype), master.as_mut_slice());
                quiet(master.as_mut_slice());
            }
            Weights::Split { low, .. } => low.as_mut_slice::<u16>().fill(0),
        }
        Ok(())
    }

    /// Whether a master is more precise than its weight.
    pub(super) fn precise(&self) -> bool {
        matches!(self, Weights::Rounded { .. } | Weights::Split { .. })
    }

    /// Takes over 16-bit weights that somebody else may have changed: where one is a rounding of its master (a tie may
    /// have gone either way), the master keeps its precision.
    pub(super) fn merge(&mut self, level: Level, pool: &rayon::ThreadPool, dtype: DType, theirs: &[u16]) {
        let theirs = theirs.par_chunks(PIECE);
        pool.install(|| match self {
            Weights::Rounded { master, .. } => {
                let masters = master.as_mut_slice().par_chunks_mut(PIECE);
                masters.zip(theirs).for_each(|(master, theirs)| merge(level, dtype, master, theirs));
            }
            Weights::Split { high, low } => {
                let high = high.settle().0.as_mut_slice().par_chunks_mut(PIECE);
                high.zip(low.as_mut_slice().par_chunks_mut(PIECE)).zip(theirs).for_each(|((high, low), theirs)| {
                    let mut master = vec![0.0; high.len()];
                    optim::join(high, low, &mut master);
                    merge(level, dtype, &mut master, theirs);
                    optim::split(&master, high, low);
                });
            }
            Weights::Own(_) | Weights::Bare(_) => {} // see precise()
        });
    }

    /// Waits for what is away, however it ends.
    pub(super) fn settle(&mut self) {
        let _ = self.upload().settle();
    }
}

fn copy(from: &[f32], to: &mut Region) {
    to.as_mut_slice().copy_from_slice(from);
    quiet(to.as_mut_slice());
}

fn merge(level: Level, dtype: DType, master: &mut [f32], theirs: &[u16]) {
    let (mut nearest, mut away, mut low) = (vec![0; theirs.len()], vec![0; theirs.len()], vec![0; theirs.len()]);
    let mut widened = vec![0.0; theirs.len()];
    optim::split(master, &mut away, &mut low);
    let (wide, narrowed) = match dtype {
        DType::F16 => (Source::F16(theirs), Target::F16(&mut nearest)),
        _ => (Source::Bf16(theirs), Target::Bf16(&mut nearest)),
    };
    narrow(level, master, narrowed);
    widen(level, wide, &mut widened);
    for i in 0..theirs.len() {
        if theirs[i] != nearest[i] && (theirs[i] != away[i] || dtype == DType::F16) {
            master[i] = widened[i];
        }
    }
}
