//! Instruction sets, and the way from slices to the loop made for one of them.
//!
//! All of the room's `unsafe` is below here. The functions of this file are the boundary: they check lengths and
//! that the CPU has the level, then call [`body`] through an entry point that enables the level's features.

mod body;
mod element;
mod lanes;
mod scalar;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

use super::adamw::{Chunk, Consts};
use super::convert::{Source, Target};
use crate::error::{Error, Result};
use body::Streams;
use element::{Bf16, F16, F32, Nothing, Read, Write};

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

/// See [`super::update`].
pub(super) fn update(level: Level, chunk: Chunk<'_>, consts: &Consts) {
    /// # Safety
    /// The pointers of `s` are valid for `s.len` elements and do not overlap.
    unsafe fn run<G: Read, W: Write>(level: Level, s: Streams<G, W>, consts: &Consts) {
        at_level!(level, update::<G, W>(s, consts))
    }
    /// # Safety
    /// As [`run`], with `weight` for the stream that `s` lacks.
    unsafe fn with_weight<G: Read>(level: Level, s: Streams<G, Nothing>, weight: Target<'_>, consts: &Consts) {
        // SAFETY: our contract, and the target is as long as the streams.
        unsafe {
            match weight {
                Target::None => run(level, s, consts),
                Target::F32(w) => run(level, s.with_weight::<F32>(w.as_mut_ptr()), consts),
                Target::Bf16(w) => run(level, s.with_weight::<Bf16>(w.as_mut_ptr()), consts),
                Target::F16(w) => run(level, s.with_weight::<F16>(w.as_mut_ptr()), consts),
            }
        }
    }

    chunk.check();
    let Chunk { master, exp_avg, exp_avg_sq, grad, weight } = chunk;
    // SAFETY: all slices are equally long, and those written are borrowed exclusively.
    unsafe {
        match grad {
            Source::F32(g) => {
                with_weight(level, Streams::<F32, _>::new(master, exp_avg, exp_avg_sq, g), weight, consts)
            }
            Source::Bf16(g) => {
                with_weight(level, Streams::<Bf16, _>::new(master, exp_avg, exp_avg_sq, g), weight, consts)
            }
            Source::F16(g) => {
                with_weight(level, Streams::<F16, _>::new(master, exp_avg, exp_avg_sq, g), weight, consts)
            }
        }
    }
}

/// See [`super::accumulate`].
pub(super) fn accumulate(level: Level, sum: &mut [f32], addend: Source<'_>) {
    /// # Safety
    /// Both pointers are valid for `len` elements and do not overlap.
    unsafe fn run<G: Read>(level: Level, sum: *mut f32, addend: *const G::Raw, len: usize) {
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
