//! What happens to one group of elements: the Adam step, or, to measure the memory, next to nothing.

#![allow(clippy::manual_map)] // a closure need not be inlined where the target features are

use super::super::adamw::Consts;
use super::lanes::Lanes;

/// The state of one group of elements.
pub(super) struct State<L: Lanes> {
    pub(super) w: L::F,
    pub(super) m: L::F,
    pub(super) v: L::F,
    /// Largest `v` so far, with AMSGrad.
    pub(super) max: Option<L::F>,
}

/// New state from old state and gradient.
pub(super) trait Rule<L: Lanes> {
    /// Whether storing may round stochastically.
    const RANDOM: bool;
    /// # Safety
    /// The CPU has `L`.
    unsafe fn apply(&self, old: State<L>, g: L::F) -> State<L>;
}

/// The Adam step's constants in registers.
pub(super) struct Step<L: Lanes> {
    smallest: L::F,
    grad_scale: L::F,
    l2: L::F,
    keep: L::F,
    lerp: L::F,
    beta2: L::F,
    one_minus_beta2: L::F,
    inv_bias2_sqrt: L::F,
    eps: L::F,
    neg_step_size: L::F,
    normal: L::I,
    add_l2: bool,
    lerp_from_grad: bool,
}

impl<L: Lanes> Step<L> {
    /// # Safety
    /// The CPU has `L`.
    #[inline(always)]
    pub(super) unsafe fn new(c: &Consts) -> Self {
        // SAFETY: our contract is that of Lanes.
        unsafe {
            Self {
                smallest: L::splat(c.smallest),
                grad_scale: L::splat(c.grad_scale),
                l2: L::splat(c.l2),
                keep: L::splat(c.keep),
                lerp: L::splat(c.lerp),
                beta2: L::splat(c.beta2),
                one_minus_beta2: L::splat(c.one_minus_beta2),
                inv_bias2_sqrt: L::splat(c.inv_bias2_sqrt),
                eps: L::splat(c.eps),
                neg_step_size: L::splat(c.neg_step_size),
                normal: L::splat_bits(c.normal),
                add_l2: c.add_l2,
                lerp_from_grad: c.lerp_from_grad,
            }
        }
    }

    /// +0 for a denormal, without touching the thread's MXCSR; a NaN is no denormal and stays.
    ///
    /// # Safety
    /// The CPU has `L`.
    #[inline(always)]
    unsafe fn flush(&self, x: L::F) -> L::F {
        // SAFETY: our contract is that of Lanes.
        unsafe { L::float(L::keep_if_any(L::bits(x), self.normal)) }
    }
}

impl<L: Lanes> Rule<L> for Step<L> {
    const RANDOM: bool = true;

    #[inline(always)]
    unsafe fn apply(&self, old: State<L>, g: L::F) -> State<L> {
        // SAFETY: our contract is that of Lanes.
        unsafe {
            let State { mut w, m, v, max } = old;
            let mut g = L::mul(L::drop_below(g, self.smallest), self.grad_scale);
            if self.add_l2 {
                g = L::fma(w, self.l2, g);
            }
            w = L::mul(w, self.keep);

            let m = L::fma(self.lerp, L::sub(g, m), if self.lerp_from_grad { g } else { m });
            let v = L::fma(L::mul(self.one_minus_beta2, g), g, L::mul(self.beta2, v));
            let (m, v) = (self.flush(m), self.flush(v)); // before use: denormals are slow everywhere

            let max = match max {
                Some(max) => Some(L::max(max, v)),
                None => None,
            };
            let denom = L::fma(L::sqrt(max.unwrap_or(v)), self.inv_bias2_sqrt, self.eps);
            w = L::fma(L::div(m, denom), self.neg_step_size, w);
            State { w, m, v, max }
        }
    }
}

/// Mixes the gradient into everything, so that no load or store can be left out.
pub(super) struct Probe;

impl<L: Lanes> Rule<L> for Probe {
    const RANDOM: bool = false;

    #[inline(always)]
    unsafe fn apply(&self, old: State<L>, g: L::F) -> State<L> {
        // SAFETY: our contract is that of Lanes.
        unsafe {
            State {
                w: xor::<L>(old.w, g),
                m: xor::<L>(old.m, g),
                v: xor::<L>(old.v, g),
                max: match old.max {
                    Some(max) => Some(xor::<L>(max, g)),
                    None => None,
                },
            }
        }
    }
}

/// # Safety
/// The CPU has `L`.
#[inline(always)]
unsafe fn xor<L: Lanes>(a: L::F, b: L::F) -> L::F {
    // SAFETY: our contract is that of Lanes.
    unsafe { L::float(L::xor(L::bits(a), L::bits(b))) }
}
