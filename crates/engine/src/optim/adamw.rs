//! The Adam/AdamW step: hyperparameters, the constants of one step, and the update of one chunk.
//!
//! The order of operations is that of torch's single-tensor CPU `AdamW`, so that results can be compared with it: the
//! moments are the same bit for bit, but for gradients below [`smallest`]. The last line multiplies by `1 / sqrt(bias2)` and by the step size where torch
//! divides by the one and scales before dividing: one division less, and a difference far below the weight's last place.
//! Everything that depends only on the step is computed here once, in `f64`, and rounded to `f32` last.

#![forbid(unsafe_code)]

use super::kernels::{self, Level};
use super::layout::Chunk;

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
    /// Smaller gradients count as zero: their squares are denormal, and eps hides what they could do.
    pub(super) smallest: f32,
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
    pub(super) inv_bias2_sqrt: f32,
    pub(super) eps: f32,
    pub(super) neg_step_size: f32,
    /// Moments with none of these bits become +0: the exponent, so that denormals do.
    pub(super) normal: u32,
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
        Self {
            smallest: smallest(hyper, grad_scale) as f32,
            grad_scale: if maximize { -grad_scale as f32 } else { grad_scale as f32 },
            l2: weight_decay as f32,
            add_l2: !decoupled,
            keep: if decoupled { (1.0 - lr * weight_decay) as f32 } else { 1.0 },
            lerp: if lerp_from_grad { toward as f32 - 1.0 } else { toward as f32 },
            lerp_from_grad,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            inv_bias2_sqrt: bias2.sqrt().recip() as f32,
            eps: eps as f32,
            neg_step_size: -(lr / bias1) as f32,
            // Without eps a denormal second moment still decides the quotient.
            normal: if eps > 0.0 { f32::INFINITY.to_bits() } else { u32::MAX },
        }
    }
}

/// The smallest gradient that is not taken for zero. Below it `(1 - beta2) * g * g` is denormal, which a processor that
/// makes denormals in microcode needs ten whole steps' time for; and it moves a weight by less than `lr * 2^-24`, as
/// `eps` is larger than it by that factor. Zero, so that nothing is dropped, where `eps` is not.
pub(super) fn smallest(hyper: &Hyper, grad_scale: f64) -> f64 {
    let least = 1.001 * f64::from(f32::MIN_POSITIVE);
    let scaled = (least / (1.0 - hyper.beta2)).sqrt().max(least / (1.0 - hyper.beta1));
    let hidden = scaled <= hyper.eps / f64::from(1 << 24);
    if hidden && grad_scale != 0.0 { scaled / grad_scale.abs() } else { 0.0 }
}

/// Updates one chunk.
///
/// # Panics
///
/// If the slices differ in length, or if this CPU lacks `level`.
pub fn update(level: Level, chunk: &mut Chunk<'_>, consts: &Consts) {
    kernels::update(level, chunk, consts);
}

/// Reads and writes what [`update`] would, with next to no arithmetic: how fast the memory is. Destroys the state.
///
/// # Panics
///
/// As [`update`].
pub fn probe(level: Level, chunk: &mut Chunk<'_>) {
    kernels::probe(level, chunk);
}
