//! The Adam/AdamW step: hyperparameters, the constants of one step, and the update of one chunk.
//!
//! The order of operations is that of torch's single-tensor CPU `AdamW`, so that results can be compared with it.
//! Everything that depends only on the step is computed here once, in `f64`, and rounded to `f32` last.

#![forbid(unsafe_code)]

use super::convert::{Source, Target};
use super::kernels::{self, Level};

/// What the user chose.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hyper {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Decay the weights directly (AdamW) instead of through the gradient (Adam with L2).
    pub decoupled: bool,
    /// Ascend instead of descend.
    pub maximize: bool,
}

/// The constants of one step, as the kernels use them.
#[derive(Debug, Clone, Copy)]
pub struct Consts {
    /// Multiplies the gradient; negative when maximizing, which is exact.
    pub(super) grad_scale: f32,
    /// L2 factor; unused unless `add_l2`.
    pub(super) l2: f32,
    /// Whether the weights leak into the gradient.
    pub(super) add_l2: bool,
    /// Multiplies the weights; 1 when the decay is not decoupled.
    pub(super) keep: f32,
    /// Factor of `g - m` in torch's lerp.
    pub(super) lerp: f32,
    /// Lerp starts from `g` (small beta1) instead of from `m`.
    pub(super) lerp_from_grad: bool,
    pub(super) beta2: f32,
    pub(super) one_minus_beta2: f32,
    pub(super) bias2_sqrt: f32,
    pub(super) eps: f32,
    pub(super) neg_step_size: f32,
    /// Moments whose magnitude bits lie below this become +0.
    pub(super) flush_below: u32,
}

impl Consts {
    /// The constants of update number `step` (the first is 1), for gradients to be multiplied by `grad_scale`.
    pub fn new(hyper: &Hyper, step: u64, grad_scale: f64) -> Self {
        let Hyper { lr, beta1, beta2, eps, weight_decay, decoupled, maximize } = *hyper;
        let step = step as f64;
        let bias1 = 1.0 - beta1.powf(step);
        let bias2 = 1.0 - beta2.powf(step);
        let toward = 1.0 - beta1;
        let lerp_from_grad = toward as f32 >= 0.5;
        let grad_scale = grad_scale as f32;
        Self {
            grad_scale: if maximize { -grad_scale } else { grad_scale },
            l2: weight_decay as f32,
            add_l2: !decoupled,
            keep: if decoupled { (1.0 - lr * weight_decay) as f32 } else { 1.0 },
            lerp: if lerp_from_grad { toward as f32 - 1.0 } else { toward as f32 },
            lerp_from_grad,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            bias2_sqrt: bias2.sqrt() as f32,
            eps: eps as f32,
            neg_step_size: -(lr / bias1) as f32,
            // Without eps a denormal second moment still decides the quotient.
            flush_below: if eps > 0.0 { f32::MIN_POSITIVE.to_bits() } else { 0 },
        }
    }
}

/// One run of consecutive elements to update, all slices of the same length.
#[derive(Debug)]
pub struct Chunk<'a> {
    /// Master weights, updated in place.
    pub master: &'a mut [f32],
    /// First moment, updated in place.
    pub exp_avg: &'a mut [f32],
    /// Second moment, updated in place.
    pub exp_avg_sq: &'a mut [f32],
    /// The gradient.
    pub grad: Source<'a>,
    /// Where the rounded new weights go.
    pub weight: Target<'a>,
}

impl<'a> Chunk<'a> {
    /// Divides every stream after `mid` elements.
    pub fn split_at(self, mid: usize) -> (Self, Self) {
        let (w0, w1) = self.master.split_at_mut(mid);
        let (m0, m1) = self.exp_avg.split_at_mut(mid);
        let (v0, v1) = self.exp_avg_sq.split_at_mut(mid);
        let (g0, g1) = self.grad.split_at(mid);
        let (t0, t1) = self.weight.split_at(mid);
        (
            Chunk { master: w0, exp_avg: m0, exp_avg_sq: v0, grad: g0, weight: t0 },
            Chunk { master: w1, exp_avg: m1, exp_avg_sq: v1, grad: g1, weight: t1 },
        )
    }
}

impl Chunk<'_> {
    /// # Panics
    ///
    /// If the slices differ in length.
    pub(super) fn check(&self) {
        let len = self.master.len();
        assert_eq!(self.exp_avg.len(), len, "exp_avg and master differ in length");
        assert_eq!(self.exp_avg_sq.len(), len, "exp_avg_sq and master differ in length");
        assert_eq!(self.grad.len(), len, "grad and master differ in length");
        assert!(self.weight.len().is_none_or(|n| n == len), "weight and master differ in length");
    }
}

/// Updates one chunk.
///
/// # Panics
///
/// If the slices differ in length, or if this CPU lacks `level`.
pub fn update(level: Level, chunk: Chunk<'_>, consts: &Consts) {
    kernels::update(level, chunk, consts);
}
