//! Instruction sets, and the way from slices to the loop made for one of them.
//!
//! All of the room's `unsafe` is below here. The functions of this file are the boundary: they check lengths and
//! that the CPU has the level, then call [`body`] through an entry point that enables the level's features.

mod body;
mod element;
mod lanes;
mod random;
mod reduce;
mod scalar;
mod step;
mod weights;

/// An intrinsic on both registers of a group.
#[cfg(target_arch = "x86_64")]
macro_rules! both {
    ($intrinsic:path, $($x:expr),+) => {
        [$intrinsic($($x[0]),+), $intrinsic($($x[1]),+)]
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

use super::adamw::Consts;
use super::convert::{Source, Target};
use super::layout::{self, Chunk, Moments, Slices};
use super::noise::Noise;
use crate::error::{Error, Result};
use body::Streams;
use element::{Bf16, F16, F32, Moment, Nothing, Read, Write};
use weights::{Bare, Master, Split, Weights};

/// The option that overrides the choice.
const OPTION: &str = "TRAINSTREAM_CPU";

/// An instruction set to compute with; all give the same bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Plain Rust, on any CPU.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW and VL.
    Avx512,
}

impl Level {
    const ALL: [Level; 3] = [Level::Scalar, Level::Avx2, Level::Avx512];

    /// The best this CPU has, unless the environment variable `TRAINSTREAM_CPU` names one.
    pub fn detect() -> Result<Self> {
        Self::choose(std::env::var_os(OPTION).map(|name| name.to_string_lossy().into_owned()).as_deref())
    }

    /// [`Level::detect`] with the variable's value; empty is unset.
    pub(super) fn choose(forced: Option<&str>) -> Result<Self> {
        let available = Self::available();
        let Some(name) = forced.filter(|name| !name.is_empty()) else {
            return Ok(available.into_iter().max().unwrap_or(Level::Scalar));
        };
        available.iter().copied().find(|level| level.name() == name).ok_or_else(|| Error::Config {
            option: OPTION,
            value: name.into(),
            allowed: format!("this CPU supports {}", available.iter().map(|l| l.name()).collect::<Vec<_>>().join(", ")),
        })
    }

    /// All that this CPU has, from slow to fast.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|level| level.supported()).collect()
    }

    /// The name `TRAINSTREAM_CPU` knows it by.
    pub fn name(self) -> &'static str {
        match self {
            Level::Scalar => "scalar",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
        }
    }

    /// Whether this CPU has it; std caches the answer.
    #[cfg(target_arch = "x86_64")]
    fn supported(self) -> bool {
        use std::arch::is_x86_feature_detected as has;
        let avx2 = || has!("avx2") && has!("fma") && has!("f16c");
        match self {
            Level::Scalar => true,
            Level::Avx2 => avx2(),
            Level::Avx512 => avx2() && has!("avx512f") && has!("avx512bw") && has!("avx512vl"),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn supported(self) -> bool {
        self == Level::Scalar
    }
}

/// Calls one entry point of the level's module, having checked that the CPU has it. The rest of the entry point's
/// contract is the promise of whoever expands this, which therefore is an unsafe function.
macro_rules! at_level {
    ($level:expr, $entry:ident :: <$($t:ty),+> ($($arg:expr),+)) => {{
        let level: Level = $level;
        assert!(level.supported(), "this CPU lacks {}", level.name());
        match level {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the CPU has the level; the pointers are the caller's promise.
            Level::Avx512 => unsafe { avx512::$entry::<$($t),+>($($arg),+) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the CPU has the level; the pointers are the caller's promise.
            Level::Avx2 => unsafe { avx2::$entry::<$($t),+>($($arg),+) },
            // SAFETY: the pointers are the caller's promise.
            _ => unsafe { scalar::$entry::<$($t),+>($($arg),+) },
        }
    }};
}

/// What to do with the streams, once their types are known.
trait Job: Copy {
    /// # Safety
    /// The pointers of `s` are valid for `s.len` elements and do not overlap.
    unsafe fn run<K: Weights, M: Moment, G: Read>(self, s: Streams<K, M, G>);
}

#[derive(Clone, Copy)]
struct Update<'a>(Level, &'a Consts);

impl Job for Update<'_> {
    unsafe fn run<K: Weights, M: Moment, G: Read>(self, s: Streams<K, M, G>) {
        at_level!(self.0, update::<K, M, G>(s, self.1))
    }
}

#[derive(Clone, Copy)]
struct Probe(Level);

impl Job for Probe {
    unsafe fn run<K: Weights, M: Moment, G: Read>(self, s: Streams<K, M, G>) {
        at_level!(self.0, probe::<K, M, G>(s))
    }
}

/// See [`super::update`].
pub(super) fn update(level: Level, chunk: &mut Chunk<'_>, consts: &Consts) {
    by_grad(Update(level, consts), chunk);
}

/// See [`super::probe`].
pub(super) fn probe(level: Level, chunk: &mut Chunk<'_>) {
    by_grad(Probe(level), chunk);
}

/// From slices to typed streams: first the gradient, then the moments, last the weights.
fn by_grad(job: impl Job, chunk: &mut Chunk<'_>) {
    chunk.check();
    let Chunk { weights, moments, grad, noise } = chunk;
    match grad {
        Source::F32(g) => by_moments::<F32>(job, weights, moments, g, *noise),
        Source::Bf16(g) => by_moments::<Bf16>(job, weights, moments, g, *noise),
        Source::F16(g) => by_moments::<F16>(job, weights, moments, g, *noise),
    }
}

fn by_moments<G: Read>(
    job: impl Job,
    weights: &mut layout::Weights<'_>,
    moments: &mut Moments<'_>,
    grad: &[G::Raw],
    noise: Noise,
) {
    match moments {
        Moments::F32(m) => by_weights::<F32, G>(job, weights, m, grad, noise),
        Moments::Bf16(m) => by_weights::<Bf16, G>(job, weights, m, grad, noise),
    }
}

fn by_weights<M: Moment, G: Read>(
    job: impl Job,
    weights: &mut layout::Weights<'_>,
    moments: &mut Slices<'_, M::Raw>,
    grad: &[G::Raw],
    noise: Noise,
) {
    let Slices { exp_avg, exp_avg_sq, max_exp_avg_sq } = moments;
    let streams = Streams::<_, M, G> {
        weights: (),
        len: exp_avg.len(),
        exp_avg: exp_avg.as_mut_ptr(),
        exp_avg_sq: exp_avg_sq.as_mut_ptr(),
        max_exp_avg_sq: max_exp_avg_sq.as_mut().map_or(std::ptr::null_mut(), |max| max.as_mut_ptr()),
        grad: grad.as_ptr(),
        noise,
    };
    // SAFETY: all slices are equally long, and those written are borrowed exclusively.
    unsafe {
        match weights {
            layout::Weights::Master { master, weight } => match weight {
                Target::None => job.run(streams.with(Master::<Nothing>::new(master, std::ptr::null_mut()))),
                Target::F32(w) => job.run(streams.with(Master::<F32>::new(master, w.as_mut_ptr()))),
                Target::Bf16(w) => job.run(streams.with(Master::<Bf16>::new(master, w.as_mut_ptr()))),
                Target::F16(w) => job.run(streams.with(Master::<F16>::new(master, w.as_mut_ptr()))),
            },
            layout::Weights::Split { high, low } => {
                job.run(streams.with(Split { high: high.as_mut_ptr(), low: low.as_mut_ptr() }));
            }
            layout::Weights::Bare(weight) => job.run(streams.with(Bare { weight: weight.as_mut_ptr() })),
        }
    }
}

/// See [`super::accumulate`].
pub(super) fn accumulate(level: Level, sum: &mut [f32], addend: Source<'_>) -> f64 {
    /// # Safety
    /// Both pointers are valid for `len` elements and do not overlap.
    unsafe fn run<G: Read>(level: Level, sum: *mut f32, addend: *const G::Raw, len: usize) -> f64 {
        at_level!(level, accumulate::<G>(sum, addend, len))
    }

    let (len, to) = (sum.len(), sum.as_mut_ptr());
    assert_eq!(addend.len(), len, "sum and addend differ in length");
    // SAFETY: both are `len` long, and `sum` is borrowed exclusively.
    unsafe {
        match addend {
            Source::F32(x) => run::<F32>(level, to, x.as_ptr(), len),
            Source::Bf16(x) => run::<Bf16>(level, to, x.as_ptr(), len),
            Source::F16(x) => run::<F16>(level, to, x.as_ptr(), len),
        }
    }
}

/// See [`super::squares`].
pub(super) fn squares(level: Level, from: Source<'_>) -> f64 {
    /// # Safety
    /// The pointer is valid for `len` elements.
    unsafe fn run<G: Read>(level: Level, from: *const G::Raw, len: usize) -> f64 {
        at_level!(level, squares::<G>(from, len))
    }

    // SAFETY: a slice is valid for its length.
    unsafe {
        match from {
            Source::F32(x) => run::<F32>(level, x.as_ptr(), x.len()),
            Source::Bf16(x) => run::<Bf16>(level, x.as_ptr(), x.len()),
            Source::F16(x) => run::<F16>(level, x.as_ptr(), x.len()),
        }
    }
}

/// See [`super::read_probe`].
pub(super) fn read_probe(level: Level, from: Source<'_>) -> u32 {
    /// # Safety
    /// The pointer is valid for `len` elements.
    unsafe fn run<G: Read>(level: Level, from: *const G::Raw, len: usize) -> u32 {
        at_level!(level, read::<G>(from, len))
    }

    // SAFETY: a slice is valid for its length.
    unsafe {
        match from {
            Source::F32(x) => run::<F32>(level, x.as_ptr(), x.len()),
            Source::Bf16(x) => run::<Bf16>(level, x.as_ptr(), x.len()),
            Source::F16(x) => run::<F16>(level, x.as_ptr(), x.len()),
        }
    }
}

/// # Safety
/// Both pointers are valid for `len` elements and do not overlap.
unsafe fn convert<G: Read, W: Write>(level: Level, from: *const G::Raw, to: *mut W::Raw, len: usize) {
    at_level!(level, convert::<G, W>(from, to, len))
}

/// See [`super::widen`].
pub(super) fn widen(level: Level, from: Source<'_>, to: &mut [f32]) {
    let (len, to) = (to.len(), to.as_mut_ptr());
    assert_eq!(from.len(), len, "from and to differ in length");
    // SAFETY: both are `len` long, and `to` is borrowed exclusively.
    unsafe {
        match from {
            Source::F32(x) => convert::<F32, F32>(level, x.as_ptr(), to, len),
            Source::Bf16(x) => convert::<Bf16, F32>(level, x.as_ptr(), to, len),
            Source::F16(x) => convert::<F16, F32>(level, x.as_ptr(), to, len),
        }
    }
}

/// See [`super::narrow`].
pub(super) fn narrow(level: Level, from: &[f32], to: Target<'_>) {
    let (len, from) = (from.len(), from.as_ptr());
    assert!(to.len().is_none_or(|n| n == len), "from and to differ in length");
    // SAFETY: both are `len` long, and the target is borrowed exclusively.
    unsafe {
        match to {
            Target::None => {}
            Target::F32(x) => convert::<F32, F32>(level, from, x.as_mut_ptr(), len),
            Target::Bf16(x) => convert::<F32, Bf16>(level, from, x.as_mut_ptr(), len),
            Target::F16(x) => convert::<F32, F16>(level, from, x.as_mut_ptr(), len),
        }
    }
}
