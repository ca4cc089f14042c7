//! The loops, written once; each instruction set instantiates them inside a function that enables its features.
//!
//! Whole cache lines go through the wide registers, the rest through the scalar ones. Both do the same correctly
//! rounded operations in the same order, so it does not matter which element meets which.

use super::super::adamw::Consts;
use super::element::{Nothing, Read, Write};
use super::lanes::Lanes;
use super::scalar::Scalar;

/// Elements of single precision in one cache line: the stride of the loops.
pub(super) const LINE: usize = 16;

/// How far ahead to prefetch, in elements: 2 KiB of each stream.
const AHEAD: usize = 512;

/// The streams of one update, all `len` elements long and disjoint.
pub(super) struct Streams<G: Read, W: Write> {
    pub(super) master: *mut f32,
    pub(super) exp_avg: *mut f32,
    pub(super) exp_avg_sq: *mut f32,
    pub(super) grad: *const G::Raw,
    pub(super) weight: *mut W::Raw,
    pub(super) len: usize,
}

impl<G: Read> Streams<G, Nothing> {
    /// Streams over these slices; they must be equally long for the loops.
    pub(super) fn new(master: &mut [f32], exp_avg: &mut [f32], exp_avg_sq: &mut [f32], grad: &[G::Raw]) -> Self {
        Self {
            len: master.len(),
            master: master.as_mut_ptr(),
            exp_avg: exp_avg.as_mut_ptr(),
            exp_avg_sq: exp_avg_sq.as_mut_ptr(),
            grad: grad.as_ptr(),
            weight: std::ptr::dangling_mut(),
        }
    }

    /// The same, writing the weights to `weight`.
    pub(super) fn with_weight<W: Write>(self, weight: *mut W::Raw) -> Streams<G, W> {
        let Self { master, exp_avg, exp_avg_sq, grad, len, weight: _ } = self;
        Streams { master, exp_avg, exp_avg_sq, grad, weight, len }
    }
}

/// The constants of the step in registers.
struct Registers<L: Lanes> {
    grad_scale: L::F,
    l2: L::F,
    keep: L::F,
    lerp: L::F,
    beta2: L::F,
    one_minus_beta2: L::F,
    bias2_sqrt: L::F,
    eps: L::F,
    neg_step_size: L::F,
    flush_below: L::I,
    add_l2: bool,
    lerp_from_grad: bool,
}

impl<L: Lanes> Registers<L> {
    /// # Safety
    /// The CPU has `L`.
    #[inline(always)]
    unsafe fn new(c: &Consts) -> Self {
        // SAFETY: our contract is that of Lanes.
        unsafe {
            Self {
                grad_scale: L::splat(c.grad_scale),
                l2: L::splat(c.l2),
                keep: L::splat(c.keep),
                lerp: L::splat(c.lerp),
                beta2: L::splat(c.beta2),
                one_minus_beta2: L::splat(c.one_minus_beta2),
                bias2_sqrt: L::splat(c.bias2_sqrt),
                eps: L::splat(c.eps),
                neg_step_size: L::splat(c.neg_step_size),
                flush_below: L::splat_bits(c.flush_below),
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
        unsafe {
            let bits = L::bits(x);
            let magnitude = L::and(bits, L::splat_bits(0x7fff_ffff));
            L::float(L::if_below(magnitude, self.flush_below, L::splat_bits(0), bits))
        }
    }

    /// One register of elements, starting at `i`.
    ///
    /// # Safety
    /// The CPU has `L`, and `i + L::LANES <= s.len`.
    #[inline(always)]
    unsafe fn step<G: Read, W: Write>(&self, s: &Streams<G, W>, i: usize) {
        // SAFETY: the elements lie inside the streams; the rest is the contract of Lanes.
        unsafe {
            let (mut w, m, v) = (L::load(s.master.add(i)), L::load(s.exp_avg.add(i)), L::load(s.exp_avg_sq.add(i)));
            let mut g = L::mul(G::load::<L>(s.grad.add(i)), self.grad_scale);
            if self.add_l2 {
                g = L::fma(w, self.l2, g);
            }
            w = L::mul(w, self.keep);

            let m = L::fma(self.lerp, L::sub(g, m), if self.lerp_from_grad { g } else { m });
            let v = L::fma(L::mul(self.one_minus_beta2, g), g, L::mul(self.beta2, v));
            let (m, v) = (self.flush(m), self.flush(v)); // before use: denormals are slow in sqrt and div

            let denom = L::add(L::div(L::sqrt(v), self.bias2_sqrt), self.eps);
            w = L::add(w, L::div(L::mul(self.neg_step_size, m), denom));

            L::store(s.master.add(i), w);
            L::store(s.exp_avg.add(i), m);
            L::store(s.exp_avg_sq.add(i), v);
            W::store::<L>(s.weight.add(i), w);
        }
    }
}

/// Updates all elements.
///
/// # Safety
/// The CPU has `L`; the pointers of `s` are valid for `s.len` elements and do not overlap.
#[inline(always)]
pub(super) unsafe fn update<L: Lanes, G: Read, W: Write>(s: Streams<G, W>, consts: &Consts) {
    let whole = s.len - s.len % LINE;
    // SAFETY: i + LANES <= whole <= len in the first loop (LANES divides LINE), i < len in the second.
    unsafe {
        let registers = Registers::<L>::new(consts);
        for line in (0..whole).step_by(LINE) {
            for stream in [s.master, s.exp_avg, s.exp_avg_sq] {
                L::prefetch(stream.wrapping_add(line + AHEAD));
            }
            if G::WIDE {
                L::prefetch(s.grad.wrapping_add(line + AHEAD).cast());
            }
            if W::WIDE {
                L::prefetch(s.weight.wrapping_add(line + AHEAD).cast());
            }
            for i in (line..line + LINE).step_by(L::LANES) {
                registers.step(&s, i);
            }
        }
        let registers = Registers::<Scalar>::new(consts);
        for i in whole..s.len {
            registers.step(&s, i);
        }
    }
}

/// `sum += addend`.
///
/// # Safety
/// The CPU has `L`; both pointers are valid for `len` elements and do not overlap.
#[inline(always)]
pub(super) unsafe fn accumulate<L: Lanes, G: Read>(sum: *mut f32, addend: *const G::Raw, len: usize) {
    let whole = len - len % LINE;
    // SAFETY: i + LANES <= whole <= len in the first loop (LANES divides LINE), i < len in the second.
    unsafe {
        for i in (0..whole).step_by(L::LANES) {
            L::store(sum.add(i), L::add(L::load(sum.add(i)), G::load::<L>(addend.add(i))));
        }
        for i in whole..len {
            *sum.add(i) += G::load::<Scalar>(addend.add(i));
        }
    }
}

/// Copies with conversion, by way of single precision.
///
/// # Safety
/// The CPU has `L`; both pointers are valid for `len` elements and do not overlap.
#[inline(always)]
pub(super) unsafe fn convert<L: Lanes, G: Read, W: Write>(from: *const G::Raw, to: *mut W::Raw, len: usize) {
    let whole = len - len % LINE;
    // SAFETY: i + LANES <= whole <= len in the first loop (LANES divides LINE), i < len in the second.
    unsafe {
        for i in (0..whole).step_by(L::LANES) {
            W::store::<L>(to.add(i), G::load::<L>(from.add(i)));
        }
        for i in whole..len {
            W::store::<Scalar>(to.add(i), G::load::<Scalar>(from.add(i)));
        }
    }
}
