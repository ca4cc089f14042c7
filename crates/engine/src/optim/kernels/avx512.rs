//! Sixteen lanes: AVX-512 F, BW and VL.
//!
//! Contract: that of [`Lanes`]. The entry points at the end may be called only where the CPU has all of their
//! features; everything else is inlined into them.

#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::x86_64::*;

use super::super::adamw::Consts;
use super::body::{self, Streams};
use super::element::{Read, Write};
use super::lanes::Lanes;

/// 16 elements at a time.
pub(super) enum Avx512 {}

impl Lanes for Avx512 {
    const LANES: usize = 16;
    type F = __m512;
    type I = __m512i;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        _mm512_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn splat_bits(x: u32) -> __m512i {
        _mm512_set1_epi32(x.cast_signed())
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        _mm512_loadu_ps(from)
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: __m512) {
        _mm512_storeu_ps(to, x);
    }
    #[inline(always)]
    unsafe fn load_u16(from: *const u16) -> __m512i {
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()))
    }
    #[inline(always)]
    unsafe fn store_u16(to: *mut u16, x: __m512i) {
        _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(x));
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m512 {
        _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, x: __m512) {
        _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x));
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        _mm512_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        _mm512_div_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sqrt(a: __m512) -> __m512 {
        _mm512_sqrt_ps(a)
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn bits(a: __m512) -> __m512i {
        _mm512_castps_si512(a)
    }
    #[inline(always)]
    unsafe fn float(a: __m512i) -> __m512 {
        _mm512_castsi512_ps(a)
    }
    #[inline(always)]
    unsafe fn and(a: __m512i, b: __m512i) -> __m512i {
        _mm512_and_si512(a, b)
    }
    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        _mm512_or_si512(a, b)
    }
    #[inline(always)]
    unsafe fn add_bits(a: __m512i, b: __m512i) -> __m512i {
        _mm512_add_epi32(a, b)
    }
    #[inline(always)]
    unsafe fn shl16(a: __m512i) -> __m512i {
        _mm512_slli_epi32::<16>(a)
    }
    #[inline(always)]
    unsafe fn shr16(a: __m512i) -> __m512i {
        _mm512_srli_epi32::<16>(a)
    }
    #[inline(always)]
    unsafe fn if_below(a: __m512i, limit: __m512i, yes: __m512i, no: __m512i) -> __m512i {
        _mm512_mask_blend_epi32(_mm512_cmplt_epi32_mask(a, limit), no, yes)
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const f32) {
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
}

/// # Safety
/// See [`body::update`]; the CPU has the features below.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn update<G: Read, W: Write>(s: Streams<G, W>, consts: &Consts) {
    body::update::<Avx512, G, W>(s, consts);
}

/// # Safety
/// See [`body::accumulate`]; the CPU has the features below.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn accumulate<G: Read>(sum: *mut f32, addend: *const G::Raw, len: usize) {
    body::accumulate::<Avx512, G>(sum, addend, len);
}

/// # Safety
/// See [`body::convert`]; the CPU has the features below.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn convert<G: Read, W: Write>(from: *const G::Raw, to: *mut W::Raw, len: usize) {
    body::convert::<Avx512, G, W>(from, to, len);
}
