//! Where one parameter's master weights, moments and gradient live: host RAM.
//!
//! A slot is locked by whoever works on it: the worker during an update, the caller while it queues a
//! gradient. Regions that a copy works on are away with their ticket; see [`Holding`].

#![forbid(unsafe_code)]

mod holding;

pub use holding::Holding;

use crate::dtype::DType;
use crate::error::Result;
use crate::host::{Arena, Region};
use crate::optim::{Chunk, Level, Source, Target, accumulate, widen};

/// What a slot must hold.
#[derive(Debug, Clone, Copy)]
pub struct SlotSpec {
    /// Elements of the parameter.
    pub numel: usize,
    /// Element type of the weight on the device, and of its gradients.
    pub weight: DType,
}

/// One of the fp32 arrays of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Array {
    /// fp32 master weights.
    Master,
    /// First moment.
    ExpAvg,
    /// Second moment.
    ExpAvgSq,
}

/// The host state of one parameter.
#[derive(Debug)]
pub struct Slot {
    /// What it was made for.
    pub spec: SlotSpec,
    /// Updates done so far.
    pub step: u64,
    /// Counts the gradients that were begun anew; a queued addend of an older one is dropped.
    pub generation: u64,
    master: Holding,
    exp_avg: Region,
    exp_avg_sq: Region,
    /// Gradient in the weight's type, as it arrived.
    gradient: Holding,
    /// fp32 sum, once a second gradient or an edited one came to a 16-bit slot.
    sum: Option<Region>,
    summed: bool,
    /// 16-bit weights on their way to the device; fp32 weights are sent from the master itself.
    wire: Option<Holding>,
}

impl Slot {
    /// Bytes of the regions [`Slot::new`] takes, in its order.
    pub fn sizes(spec: SlotSpec) -> Vec<usize> {
        let (fp32, own) = (4 * spec.numel, spec.weight.size() * spec.numel);
        let mut sizes = vec![fp32, fp32, fp32, own];
        if spec.weight != DType::F32 {
            sizes.push(own);
        }
        sizes
    }

    /// A slot over zeroed regions of [`Slot::sizes`].
    pub fn new(spec: SlotSpec, regions: &mut impl Iterator<Item = Region>) -> Self {
        let mut next = || regions.next().expect("one region per size");
        let (master, exp_avg, exp_avg_sq, gradient) = (next(), next(), next(), next());
        Slot {
            spec,
            step: 0,
            generation: 0,
            master: master.into(),
            exp_avg,
            exp_avg_sq,
            gradient: gradient.into(),
            sum: None,
            summed: false,
            wire: (spec.weight != DType::F32).then(|| next().into()),
        }
    }

    /// Host bytes by use: master, moments, gradient (with its fp32 sum), wire.
    pub fn bytes(&self) -> [usize; 4] {
        let (n, own) = (self.spec.numel, self.spec.weight.size() * self.spec.numel);
        let wire = if self.wire.is_some() { own } else { 0 };
        [4 * n, 8 * n, own + self.sum.as_ref().map_or(0, Region::bytes), wire]
    }

    /// Where a first gradient goes; begins a new generation.
    pub fn begin_gradient(&mut self) -> &mut Holding {
        self.generation += 1;
        self.summed = false;
        &mut self.gradient
    }

    /// Where the weights are sent from.
    pub fn upload(&mut self) -> &mut Holding {
        self.wire.as_mut().unwrap_or(&mut self.master)
    }

    /// Waits for what is away, and shows all that an update works on.
    pub fn chunk(&mut self) -> Result<Chunk<'_>> {
        let weight = self.spec.weight;
        let grad = if self.summed {
            Source::F32(self.sum.as_ref().expect("summed").as_slice())
        } else {
            source(self.gradient.region()?, weight)
        };
        let target = match &mut self.wire {
            Some(wire) => target(wire.region()?, weight),
            None => Target::None,
        };
        Ok(Chunk {
            master: self.master.region()?.as_mut_slice(),
            exp_avg: self.exp_avg.as_mut_slice(),
            exp_avg_sq: self.exp_avg_sq.as_mut_slice(),
            grad,
            weight: target,
        })
    }

    /// Adds a gradient of the weight's type; 16-bit gradients are summed in fp32.
    pub fn add_gradient(
        &mut self,
        level: Level,
        addend: &Region,
        arena: &Arena,
        pool: &rayon::ThreadPool,
    ) -> Result<()> {
        let (addend, _) = source(addend, self.spec.weight).split_at(self.spec.numel); // staging may be longer
        accumulate(level, self.fp32_gradient(level, arena, pool)?, addend);
        Ok(())
    }

    /// The gradient as fp32.
    pub fn read_gradient(&mut self, level: Level, to: &mut [f32]) -> Result<()> {
        if self.summed {
            to.copy_from_slice(self.sum.as_ref().expect("summed").as_slice());
        } else {
            widen(level, source(self.gradient.region()?, self.spec.weight), to);
        }
        Ok(())
    }

    /// Replaces the gradient by fp32 values.
    pub fn write_gradient(
        &mut self,
        level: Level,
        from: &[f32],
        arena: &Arena,
        pool: &rayon::ThreadPool,
    ) -> Result<()> {
        self.fp32_gradient(level, arena, pool)?.copy_from_slice(from);
        Ok(())
    }

    /// One of the fp32 arrays, here and at rest. A failed upload does not harm them.
    pub fn array(&mut self, which: Array) -> &mut [f32] {
        match which {
            Array::Master => self.master.settle().0.as_mut_slice(),
            Array::ExpAvg => self.exp_avg.as_mut_slice(),
            Array::ExpAvgSq => self.exp_avg_sq.as_mut_slice(),
        }
    }

    /// Waits for all that is away, however it ends.
    pub fn settle(&mut self) {
        let holdings = [Some(&mut self.master), Some(&mut self.gradient), self.wire.as_mut()];
        for holding in holdings.into_iter().flatten() {
            let _ = holding.settle();
        }
    }

    /// Sets the master from weights that came back into [`Slot::upload`].
    pub fn adopt_upload(&mut self, level: Level) -> Result<()> {
        if let Some(wire) = &mut self.wire {
            widen(level, source(wire.region()?, self.spec.weight), self.master.region()?.as_mut_slice());
        }
        Ok(())
    }

    fn fp32_gradient(&mut self, level: Level, arena: &Arena, pool: &rayon::ThreadPool) -> Result<&mut [f32]> {
        let arrived = self.gradient.region()?;
        if self.spec.weight == DType::F32 {
            return Ok(arrived.as_mut_slice());
        }
        if self.sum.is_none() {
            self.sum = Some(arena.reserve_one(4 * self.spec.numel, pool)?);
        }
        let sum = self.sum.as_mut().expect("reserved above").as_mut_slice();
        if !self.summed {
            widen(level, source(arrived, self.spec.weight), sum);
            self.summed = true;
        }
        Ok(sum)
    }
}

fn source(region: &Region, dtype: DType) -> Source<'_> {
    match dtype {
        DType::F32 => Source::F32(region.as_slice()),
        DType::Bf16 => Source::Bf16(region.as_slice()),
        DType::F16 => Source::F16(region.as_slice()),
    }
}

fn target(region: &mut Region, dtype: DType) -> Target<'_> {
    match dtype {
        DType::F32 => Target::F32(region.as_mut_slice()),
        DType::Bf16 => Target::Bf16(region.as_mut_slice()),
        DType::F16 => Target::F16(region.as_mut_slice()),
    }
}
