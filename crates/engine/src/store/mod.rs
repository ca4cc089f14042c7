//! Where one parameter's master weights, moments and gradient live: host RAM.
//!
//! A slot is locked by whoever works on it: the worker during an update, the caller while it queues a
//! gradient. Regions that a copy works on are away with their ticket; see [`Holding`].

#![forbid(unsafe_code)]

mod holding;
mod weights;

pub use holding::Holding;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::host::{Arena, Plain, Region};
use crate::optim::{
    Chunk, Level, Moments, Noise, Slices, Source, Target, accumulate_all, narrow, quiet, squares_all, widen,
};
use crate::stats::{Stats, Work};
use weights::Weights;

/// How the master of 16-bit weights is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Master {
    /// In single precision.
    F32,
    /// In two 16-bit halves of which one is the weight; bfloat16 only.
    Split,
    /// Not at all: weights are rounded stochastically; bfloat16 only.
    None,
}

/// What a slot must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotSpec {
    /// Elements of the parameter.
    pub numel: usize,
    /// Element type of the weight on the device, and of its gradients.
    pub weight: DType,
    /// How its master is kept; weights other than bfloat16 always have one in single precision.
    pub master: Master,
    /// Whether moments are bfloat16, rounded stochastically, instead of single precision.
    pub bf16_moments: bool,
    /// Whether the largest second moment is kept.
    pub amsgrad: bool,
    /// What its random bits depend on, beside the step: the same for the same parameter of a resumed run.
    pub key: u64,
}

impl SlotSpec {
    /// How the master is kept in fact.
    pub fn master(self) -> Master {
        if self.weight == DType::Bf16 { self.master } else { Master::F32 }
    }

    fn moment_bytes(self) -> usize {
        self.numel * if self.bf16_moments { 2 } else { 4 }
    }
}

/// One of the arrays of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Array {
    /// Master weights.
    Master,
    /// First moment.
    ExpAvg,
    /// Second moment.
    ExpAvgSq,
    /// Largest second moment.
    MaxExpAvgSq,
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
    weights: Weights,
    exp_avg: Region,
    exp_avg_sq: Region,
    max_exp_avg_sq: Option<Region>,
    /// Gradient in the weight's type, as it arrived.
    gradient: Holding,
    /// fp32 sum, once a second gradient or an edited one came to a 16-bit slot.
    sum: Option<Region>,
    summed: bool,
    /// Sum of the gradient's squares, once it was taken.
    squares: Option<f64>,
}

impl Slot {
    /// Bytes of the regions [`Slot::new`] takes, in its order.
    pub fn sizes(spec: SlotSpec) -> Vec<usize> {
        let mut sizes = Weights::sizes(spec);
        sizes.resize(sizes.len() + if spec.amsgrad { 3 } else { 2 }, spec.moment_bytes());
        sizes.push(spec.weight.size() * spec.numel);
        sizes
    }

    /// A slot over zeroed regions of [`Slot::sizes`].
    pub fn new(spec: SlotSpec, regions: &mut impl Iterator<Item = Region>) -> Self {
        let mut next = || regions.next().expect("one region per size");
        Slot {
            spec,
            step: 0,
            generation: 0,
            weights: Weights::new(spec, &mut next),
            exp_avg: next(),
            exp_avg_sq: next(),
            max_exp_avg_sq: spec.amsgrad.then(&mut next),
            gradient: next().into(),
            sum: None,
            summed: false,
            squares: None,
        }
    }

    /// Host bytes by use: master, moments, gradient (with its fp32 sum), wire.
    pub fn bytes(&self) -> [usize; 4] {
        let own = self.spec.weight.size() * self.spec.numel;
        let weights: usize = Weights::sizes(self.spec).iter().sum();
        let wire = if matches!(self.weights, Weights::Rounded { .. }) { own } else { 0 };
        let moments = self.spec.moment_bytes() * if self.spec.amsgrad { 3 } else { 2 };
        [weights - wire, moments, own + self.sum.as_ref().map_or(0, Region::bytes), wire]
    }

    /// Where a first gradient goes; begins a new generation.
    pub fn begin_gradient(&mut self) -> &mut Holding {
        self.generation += 1;
        (self.summed, self.squares) = (false, None);
        &mut self.gradient
    }

    /// Where the weights are sent from.
    pub fn upload(&mut self) -> &mut Holding {
        self.weights.upload()
    }

    /// Waits for what is away, and shows all that the next update works on.
    pub fn chunk(&mut self) -> Result<Chunk<'_>> {
        let weight = self.spec.weight;
        let grad = gradient(weight, self.summed, &self.sum, &mut self.gradient)?;
        let (exp_avg, exp_avg_sq, max) = (&mut self.exp_avg, &mut self.exp_avg_sq, &mut self.max_exp_avg_sq);
        Ok(Chunk {
            weights: self.weights.chunk(weight)?,
            moments: if self.spec.bf16_moments {
                Moments::Bf16(slices(exp_avg, exp_avg_sq, max))
            } else {
                Moments::F32(slices(exp_avg, exp_avg_sq, max))
            },
            grad,
            noise: Noise::new(self.spec.key, self.step + 1),
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
        self.squares = Some(accumulate_all(pool, level, self.fp32_gradient(level, arena, pool)?, addend));
        Ok(())
    }

    /// Sum of the gradient's squares; waits for it to arrive.
    pub fn squares(&mut self, level: Level, pool: &rayon::ThreadPool, stats: &Stats) -> Result<f64> {
        if let Some(squares) = self.squares {
            return Ok(squares);
        }
        let weight = self.spec.weight;
        let (summed, sum, arrived) = (self.summed, &self.sum, &mut self.gradient);
        let grad = stats.timed(Work::WaitGradients, || gradient(weight, summed, sum, arrived))?;
        let squares = stats.timed(Work::Accumulate, || squares_all(pool, level, grad));
        Ok(*self.squares.insert(squares))
    }

    /// The gradient as fp32.
    pub fn read_gradient(&mut self, level: Level, to: &mut [f32]) -> Result<()> {
        widen(level, gradient(self.spec.weight, self.summed, &self.sum, &mut self.gradient)?, to);
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
        self.squares = None;
        Ok(())
    }

    /// An array as fp32, at rest. A failed upload does not harm it.
    pub fn read(&mut self, level: Level, which: Array, to: &mut [f32]) -> Result<()> {
        if which == Array::Master {
            self.weights.read(level, to);
            return Ok(());
        }
        let dtype = if self.spec.bf16_moments { DType::Bf16 } else { DType::F32 };
        widen(level, source(self.moment(which)?, dtype), to);
        Ok(())
    }

    /// Replaces an array by fp32 values, rounded to nearest where it is kept in 16 bits.
    pub fn write(&mut self, level: Level, which: Array, from: &[f32]) -> Result<()> {
        if which == Array::Master {
            self.weights.write(level, from);
            return Ok(());
        }
        let bf16 = self.spec.bf16_moments;
        let moment = self.moment(which)?;
        narrow(level, from, target(moment, if bf16 { DType::Bf16 } else { DType::F32 }));
        if !bf16 {
            quiet(moment.as_mut_slice());
        }
        Ok(())
    }

    fn moment(&mut self, which: Array) -> Result<&mut Region> {
        match which {
            Array::ExpAvg => Ok(&mut self.exp_avg),
            Array::ExpAvgSq => Ok(&mut self.exp_avg_sq),
            Array::MaxExpAvgSq => self.max_exp_avg_sq.as_mut().ok_or(Error::Config {
                option: "array",
                value: "max_exp_avg_sq".into(),
                allowed: "this slot was made without amsgrad".into(),
            }),
            Array::Master => unreachable!("no moment"),
        }
    }

    /// Waits for all that is away, however it ends.
    pub fn settle(&mut self) {
        self.weights.settle();
        let _ = self.gradient.settle();
    }

    /// Makes weights that came into [`Slot::upload`] the master.
    pub fn adopt_upload(&mut self, level: Level) -> Result<()> {
        self.weights.adopt(level, self.spec.weight)
    }

    /// Whether a master is more precise than its weight, so that [`Slot::merge`] must be used once it has values.
    pub fn precise(&self) -> bool {
        self.weights.precise()
    }

    /// Takes over 16-bit weights that somebody else may have changed; where one still is a rounding of its master, the
    /// master keeps its precision.
    pub fn merge(&mut self, level: Level, pool: &rayon::ThreadPool, theirs: &Region) {
        let theirs = &theirs.as_slice()[..self.spec.numel]; // staging may be longer
        self.weights.merge(level, pool, self.spec.weight, theirs);
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

fn slices<'a, T: Plain>(
    exp_avg: &'a mut Region,
    exp_avg_sq: &'a mut Region,
    max: &'a mut Option<Region>,
) -> Slices<'a, T> {
    Slices {
        exp_avg: exp_avg.as_mut_slice(),
        exp_avg_sq: exp_avg_sq.as_mut_slice(),
        max_exp_avg_sq: max.as_mut().map(Region::as_mut_slice),
    }
}

/// The gradient: the sum, if there is one, or what arrived.
fn gradient<'a>(weight: DType, summed: bool, sum: &'a Option<Region>, arrived: &'a mut Holding) -> Result<Source<'a>> {
    if summed {
        return Ok(Source::F32(sum.as_ref().expect("summed").as_slice()));
    }
    Ok(source(arrived.region()?, weight))
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
