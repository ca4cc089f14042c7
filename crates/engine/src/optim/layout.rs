//! How the state of a run of elements lies in memory, and how it is cut.

#![forbid(unsafe_code)]

use super::convert::{Source, Target};
use super::noise::Noise;

/// The forms of weights; 16-bit halves are bits of bfloat16.
#[derive(Debug)]
pub enum Weights<'a> {
    /// fp32 master weights, and where the weights rounded from them go.
    Master {
        /// Updated in place.
        master: &'a mut [f32],
        /// Written only.
        weight: Target<'a>,
    },
    /// The fp32 master in two halves, 4 bytes together; `high` is the weight.
    Split {
        /// The nearest bfloat16 (ties away from zero).
        high: &'a mut [u16],
        /// What is missing from it, as a signed integer in units of fp32's last place.
        low: &'a mut [u16],
    },
    /// bfloat16 weights rounded stochastically; no master.
    Bare(&'a mut [u16]),
}

/// The moments, of one element type.
#[derive(Debug)]
pub struct Slices<'a, T> {
    /// First moment.
    pub exp_avg: &'a mut [T],
    /// Second moment.
    pub exp_avg_sq: &'a mut [T],
    /// Largest second moment so far; present with AMSGrad.
    pub max_exp_avg_sq: Option<&'a mut [T]>,
}

/// The forms of moments.
#[derive(Debug)]
pub enum Moments<'a> {
    /// Single precision.
    F32(Slices<'a, f32>),
    /// Bits of bfloat16, rounded stochastically.
    Bf16(Slices<'a, u16>),
}

/// One run of consecutive elements to update, all slices of the same length.
#[derive(Debug)]
pub struct Chunk<'a> {
    /// Weights, updated in place.
    pub weights: Weights<'a>,
    /// Moments, updated in place.
    pub moments: Moments<'a>,
    /// The gradient.
    pub grad: Source<'a>,
    /// Random bits, from the first element on.
    pub noise: Noise,
}

impl<'a> Weights<'a> {
    fn len(&self) -> usize {
        match self {
            Weights::Master { master, .. } => master.len(),
            Weights::Split { high, .. } => high.len(),
            Weights::Bare(weight) => weight.len(),
        }
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        match self {
            Weights::Master { master, weight } => {
                let ((m0, m1), (w0, w1)) = (master.split_at_mut(mid), weight.split_at(mid));
                (Weights::Master { master: m0, weight: w0 }, Weights::Master { master: m1, weight: w1 })
            }
            Weights::Split { high, low } => {
                let ((h0, h1), (l0, l1)) = (high.split_at_mut(mid), low.split_at_mut(mid));
                (Weights::Split { high: h0, low: l0 }, Weights::Split { high: h1, low: l1 })
            }
            Weights::Bare(weight) => {
                let (w0, w1) = weight.split_at_mut(mid);
                (Weights::Bare(w0), Weights::Bare(w1))
            }
        }
    }
}

impl<T> Slices<'_, T> {
    fn split_at(self, mid: usize) -> (Self, Self) {
        let (m0, m1) = self.exp_avg.split_at_mut(mid);
        let (v0, v1) = self.exp_avg_sq.split_at_mut(mid);
        let (x0, x1) = self.max_exp_avg_sq.map(|x| x.split_at_mut(mid)).unzip();
        (
            Slices { exp_avg: m0, exp_avg_sq: v0, max_exp_avg_sq: x0 },
            Slices { exp_avg: m1, exp_avg_sq: v1, max_exp_avg_sq: x1 },
        )
    }

    fn check(&self, len: usize) {
        assert_eq!(self.exp_avg.len(), len, "exp_avg and weights differ in length");
        assert_eq!(self.exp_avg_sq.len(), len, "exp_avg_sq and weights differ in length");
        let max = self.max_exp_avg_sq.as_ref();
        assert!(max.is_none_or(|x| x.len() == len), "max_exp_avg_sq and weights differ in length");
    }
}

impl Chunk<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.weights.len()
    }

    /// Whether there is nothing to update.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Divides every stream after `mid` elements.
    pub fn split_at(self, mid: usize) -> (Self, Self) {
        let (w0, w1) = self.weights.split_at(mid);
        let (g0, g1) = self.grad.split_at(mid);
        let (m0, m1) = match self.moments {
            Moments::F32(m) => {
                let (m0, m1) = m.split_at(mid);
                (Moments::F32(m0), Moments::F32(m1))
            }
            Moments::Bf16(m) => {
                let (m0, m1) = m.split_at(mid);
                (Moments::Bf16(m0), Moments::Bf16(m1))
            }
        };
        let after = self.noise.skip(mid);
        (
            Chunk { weights: w0, moments: m0, grad: g0, noise: self.noise },
            Chunk { weights: w1, moments: m1, grad: g1, noise: after },
        )
    }

    /// # Panics
    ///
    /// If the slices differ in length.
    pub(super) fn check(&self) {
        let len = self.len();
        match &self.weights {
            Weights::Master { weight, .. } => {
                assert!(weight.len().is_none_or(|n| n == len), "weight and master differ in length");
            }
            Weights::Split { low, .. } => assert_eq!(low.len(), len, "low and high differ in length"),
            Weights::Bare(_) => {}
        }
        match &self.moments {
            Moments::F32(m) => m.check(len),
            Moments::Bf16(m) => m.check(len),
        }
        assert_eq!(self.grad.len(), len, "grad and weights differ in length");
    }
}

/// The fp32 values that the halves of a split master stand for; see [`Weights::Split`].
///
/// # Panics
///
/// If the lengths differ.
pub fn join(high: &[u16], low: &[u16], to: &mut [f32]) {
    assert_eq!((high.len(), low.len()), (to.len(), to.len()), "the halves and their values differ in length");
    for ((&high, &low), to) in high.iter().zip(low).zip(to) {
        *to = f32::from_bits((u32::from(high) << 16).wrapping_add_signed(low.cast_signed().into()));
    }
}

/// The halves of a split master; inverse of [`join`]. A NaN loses its payload.
///
/// # Panics
///
/// If the lengths differ.
pub fn split(from: &[f32], high: &mut [u16], low: &mut [u16]) {
    assert_eq!((high.len(), low.len()), (from.len(), from.len()), "the values and their halves differ in length");
    for (from, (high, low)) in from.iter().zip(high.iter_mut().zip(low)) {
        let bits = from.to_bits();
        (*high, *low) = match from.is_nan() {
            true => ((bits >> 16) as u16 | 0x40, 0), // a payload in the low half could carry into the sign
            false => ((bits.wrapping_add(0x8000) >> 16) as u16, bits as u16),
        };
    }
}
