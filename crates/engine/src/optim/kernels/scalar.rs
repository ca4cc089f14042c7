//! One lane in plain Rust: the portable level, the tails of the others, and what they are tested against.
//!
//! Contract: that of [`Lanes`]; here only the pointers matter.

#![allow(unsafe_op_in_unsafe_fn)]

use super::super::adamw::Consts;
use super::body::{self, Streams};
use super::element::{Read, Write};
use super::lanes::Lanes;

/// One element at a time.
pub(super) enum Scalar {}

impl Lanes for Scalar {
    const LANES: usize = 1;
    type F = f32;
    type I = u32;

    #[inline(always)]
    unsafe fn splat(x: f32) -> f32 {
        x
    }
    #[inline(always)]
    unsafe fn splat_bits(x: u32) -> u32 {
        x
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
    unsafe fn load_u16(from: *const u16) -> u32 {
        u32::from(*from)
    }
    #[inline(always)]
    unsafe fn store_u16(to: *mut u16, x: u32) {
        *to = x as u16;
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> f32 {
        half::f16::from_bits(*from).to_f32()
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, x: f32) {
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
    unsafe fn add_bits(a: u32, b: u32) -> u32 {
        a.wrapping_add(b)
    }
    #[inline(always)]
    unsafe fn shl16(a: u32) -> u32 {
        a << 16
    }
    #[inline(always)]
    unsafe fn shr16(a: u32) -> u32 {
        a >> 16
    }
    #[inline(always)]
    unsafe fn if_below(a: u32, limit: u32, yes: u32, no: u32) -> u32 {
        if a < limit { yes } else { no }
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const f32) {}
}

/// # Safety
/// See [`body::update`].
pub(super) unsafe fn update<G: Read, W: Write>(s: Streams<G, W>, consts: &Consts) {
    body::update::<Scalar, G, W>(s, consts);
}

/// # Safety
/// See [`body::accumulate`].
pub(super) unsafe fn accumulate<G: Read>(sum: *mut f32, addend: *const G::Raw, len: usize) {
    body::accumulate::<Scalar, G>(sum, addend, len);
}

/// # Safety
/// See [`body::convert`].
pub(super) unsafe fn convert<G: Read, W: Write>(from: *const G::Raw, to: *mut W::Raw, len: usize) {
    body::convert::<Scalar, G, W>(from, to, len);
}
