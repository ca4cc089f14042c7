//! One lane in plain Rust: the portable level, the tails of the others, and what they are tested against.
//!
//! Contract: that of [`Lanes`]; here only the pointers matter.

#![allow(unsafe_op_in_unsafe_fn)]

use super::super::adamw::Consts;
use super::body::{BLOCK, Streams};
use super::element::{Moment, Read, Write};
use super::lanes::Lanes;
use super::reduce;
use super::weights::Weights;

/// One element at a time.
pub(super) enum Scalar {}

impl Lanes for Scalar {
    const LANES: usize = 1;
    type F = f32;
    type I = u32;
    type Sums = [f64; BLOCK];

    #[inline(always)]
    unsafe fn splat(x: f32) -> f32 {
        x
    }
    #[inline(always)]
    unsafe fn splat_bits(x: u32) -> u32 {
        x
    }
    #[inline(always)]
    unsafe fn iota() -> u32 {
        0
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> f32 {
        *from
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: f32) {
        *to = x;
    }
    #[inline(always)]
    unsafe fn load_high(from: *const u16) -> u32 {
        u32::from(*from) << 16
    }
    #[inline(always)]
    unsafe fn store_high(to: *mut u16, x: u32, _: bool) {
        *to = (x >> 16) as u16;
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> f32 {
        half::f16::from_bits(*from).to_f32()
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, x: f32, _: bool) {
        *to = half::f16::from_f32(x).to_bits();
    }
    #[inline(always)]
    unsafe fn add(a: f32, b: f32) -> f32 {
        a + b
    }
    #[inline(always)]
    unsafe fn sub(a: f32, b: f32) -> f32 {
        a - b
    }
    #[inline(always)]
    unsafe fn mul(a: f32, b: f32) -> f32 {
        a * b
    }
    #[inline(always)]
    unsafe fn div(a: f32, b: f32) -> f32 {
        a / b
    }
    #[inline(always)]
    unsafe fn sqrt(a: f32) -> f32 {
        a.sqrt()
    }
    #[inline(always)]
    unsafe fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
    #[inline(always)]
    unsafe fn max(a: f32, b: f32) -> f32 {
        if a > b { a } else { b }
    }
    #[inline(always)]
    unsafe fn bits(a: f32) -> u32 {
        a.to_bits()
    }
    #[inline(always)]
    unsafe fn float(a: u32) -> f32 {
        f32::from_bits(a)
    }
    #[inline(always)]
    unsafe fn and(a: u32, b: u32) -> u32 {
        a & b
    }
    #[inline(always)]
    unsafe fn or(a: u32, b: u32) -> u32 {
        a | b
    }
    #[inline(always)]
    unsafe fn xor(a: u32, b: u32) -> u32 {
        a ^ b
    }
    #[inline(always)]
    unsafe fn add_bits(a: u32, b: u32) -> u32 {
        a.wrapping_add(b)
    }
    #[inline(always)]
    unsafe fn mul_bits(a: u32, b: u32) -> u32 {
        a.wrapping_mul(b)
    }
    #[inline(always)]
    unsafe fn shl16(a: u32) -> u32 {
        a << 16
    }
    #[inline(always)]
    unsafe fn shr8(a: u32) -> u32 {
        a >> 8
    }
    #[inline(always)]
    unsafe fn shr15(a: u32) -> u32 {
        a >> 15
    }
    #[inline(always)]
    unsafe fn shr16(a: u32) -> u32 {
        a >> 16
    }
    #[inline(always)]
    unsafe fn sar16(a: u32) -> u32 {
        (a.cast_signed() >> 16).cast_unsigned()
    }
    #[inline(always)]
    unsafe fn keep_if_any(a: u32, mask: u32) -> u32 {
        if a & mask != 0 { a } else { 0 }
    }
    #[inline(always)]
    unsafe fn drop_below(x: f32, limit: f32) -> f32 {
        if x.abs() < limit { 0.0 } else { x }
    }
    #[inline(always)]
    unsafe fn if_nan(x: f32, yes: u32, no: u32) -> u32 {
        if x.is_nan() { yes } else { no }
    }
    #[inline(always)]
    unsafe fn no_sums() -> [f64; BLOCK] {
        [0.0; BLOCK]
    }
    #[inline(always)]
    unsafe fn add_squares(sums: &mut [f64; BLOCK], at: usize, x: f32) {
        let x = f64::from(x);
        sums[at] += x * x;
    }
    #[inline(always)]
    unsafe fn add_squares_bf16(sums: &mut [f64; BLOCK], at: usize, from: *const u16) {
        let at = at / 16 * 16 + at % 2 * 8 + at % 16 / 2;
        Self::add_squares(sums, at, f32::from_bits(Self::load_high(from)));
    }
    #[inline(always)]
    unsafe fn store_sums(sums: &[f64; BLOCK]) -> [f64; BLOCK] {
        *sums
    }
    #[inline(always)]
    unsafe fn prefetch<T>(_: *const T) {}
    #[inline(always)]
    unsafe fn fence() {}
}

/// # Safety
/// See [`Streams::update`].
pub(super) unsafe fn update<K: Weights, M: Moment, G: Read>(s: Streams<K, M, G>, consts: &Consts) {
    s.update::<Scalar>(consts);
}

/// # Safety
/// See [`Streams::probe`].
pub(super) unsafe fn probe<K: Weights, M: Moment, G: Read>(s: Streams<K, M, G>) {
    s.probe::<Scalar>();
}

/// # Safety
/// See [`reduce::accumulate`].
pub(super) unsafe fn accumulate<G: Read>(sum: *mut f32, addend: *const G::Raw, len: usize) -> f64 {
    reduce::accumulate::<Scalar, G>(sum, addend, len)
}

/// # Safety
/// See [`reduce::squares`].
pub(super) unsafe fn squares<G: Read>(from: *const G::Raw, len: usize) -> f64 {
    reduce::squares::<Scalar, G>(from, len)
}

/// # Safety
/// See [`reduce::read`].
pub(super) unsafe fn read<G: Read>(from: *const G::Raw, len: usize) -> u32 {
    reduce::read::<Scalar, G>(from, len)
}

/// # Safety
/// See [`reduce::convert`].
pub(super) unsafe fn convert<G: Read, W: Write>(from: *const G::Raw, to: *mut W::Raw, len: usize) {
    reduce::convert::<Scalar, G, W>(from, to, len);
}
