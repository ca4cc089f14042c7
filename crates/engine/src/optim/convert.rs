//! What the kernels read and write, and the plain loops between element types.
//!
//! 16-bit elements travel as their bits. Widening is exact; narrowing rounds to nearest even and keeps NaN a NaN.

#![forbid(unsafe_code)]

use super::kernels::{self, Level};

/// Elements to read.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// Bits of bfloat16.
    Bf16(&'a [u16]),
    /// Bits of half precision.
    F16(&'a [u16]),
}

impl<'a> Source<'a> {
    /// Divides the elements after `mid`.
    pub fn split_at(self, mid: usize) -> (Self, Self) {
        fn halves<'a, T>(x: &'a [T], mid: usize, of: impl Fn(&'a [T]) -> Source<'a>) -> (Source<'a>, Source<'a>) {
            let (head, tail) = x.split_at(mid);
            (of(head), of(tail))
        }
        match self {
            Source::F32(x) => halves(x, mid, Source::F32),
            Source::Bf16(x) => halves(x, mid, Source::Bf16),
            Source::F16(x) => halves(x, mid, Source::F16),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Source::F32(x) => x.len(),
            Source::Bf16(x) | Source::F16(x) => x.len(),
        }
    }

    /// Whether there is nothing to read.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Replaces NaNs by the one without a payload, which stays a NaN when the kernels round by carrying.
pub fn quiet(values: &mut [f32]) {
    values.iter_mut().filter(|x| x.is_nan()).for_each(|x| *x = f32::NAN);
}

/// Elements to write.
#[derive(Debug)]
pub enum Target<'a> {
    /// Nothing is written.
    None,
    /// Single precision.
    F32(&'a mut [f32]),
    /// Bits of bfloat16.
    Bf16(&'a mut [u16]),
    /// Bits of half precision.
    F16(&'a mut [u16]),
}

impl<'a> Target<'a> {
    /// Divides the elements after `mid`.
    pub fn split_at(self, mid: usize) -> (Self, Self) {
        fn halves<'a, T>(
            x: &'a mut [T],
            mid: usize,
            of: impl Fn(&'a mut [T]) -> Target<'a>,
        ) -> (Target<'a>, Target<'a>) {
            let (head, tail) = x.split_at_mut(mid);
            (of(head), of(tail))
        }
        match self {
            Target::None => (Target::None, Target::None),
            Target::F32(x) => halves(x, mid, Target::F32),
            Target::Bf16(x) => halves(x, mid, Target::Bf16),
            Target::F16(x) => halves(x, mid, Target::F16),
        }
    }

    /// Number of elements, if it has a length at all.
    pub(super) fn len(&self) -> Option<usize> {
        match self {
            Target::None => None,
            Target::F32(x) => Some(x.len()),
            Target::Bf16(x) | Target::F16(x) => Some(x.len()),
        }
    }
}

/// `sum += addend`, in single precision. Returns the sum of squares of the new `sum`; see [`squares`].
///
/// # Panics
///
/// If the lengths differ, or if this CPU lacks `level`.
pub fn accumulate(level: Level, sum: &mut [f32], addend: Source<'_>) -> f64 {
    kernels::accumulate(level, sum, addend)
}

/// The sum of squares, each exact and added in `f64`: it overflows for no finite input, so it is finite exactly
/// if all elements are. The order of additions depends on the length alone.
///
/// # Panics
///
/// If this CPU lacks `level`.
pub fn squares(level: Level, from: Source<'_>) -> f64 {
    kernels::squares(level, from)
}

/// Reads everything, like [`squares`] but with next to no arithmetic: how fast the memory is.
///
/// # Panics
///
/// If this CPU lacks `level`.
pub fn read_probe(level: Level, from: Source<'_>) -> u32 {
    kernels::read_probe(level, from)
}

/// Widens `from` into `to`; exact.
///
/// # Panics
///
/// If the lengths differ, or if this CPU lacks `level`.
pub fn widen(level: Level, from: Source<'_>, to: &mut [f32]) {
    kernels::widen(level, from, to);
}

/// Rounds `from` into `to`, to nearest even; NaN stays NaN.
///
/// # Panics
///
/// If the lengths differ, or if this CPU lacks `level`.
pub fn narrow(level: Level, from: &[f32], to: Target<'_>) {
    kernels::narrow(level, from, to);
}
