//! Eight lanes: AVX2 with FMA and F16C.
//!
//! Contract: that of [`Lanes`]. The entry points at the end may be called only where the CPU has all of their
//! features; everything else is inlined into them.

#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::x86_64::*;

use super::super::adamw::Consts;
use super::body::{self, Streams};
use super::element::{Read, Write};
use super::lanes::Lanes;

/// 8 elements at a time.
pub(super) enum Avx2 {}

impl Lanes for Avx2 {
    const LANES: usize = 8;
    type F = __m256;
    type I = __m256i;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        _mm256_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn splat_bits(x: u32) -> __m256i {
        _mm256_set1_epi32(x.cast_signed())
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m256 {
        _mm256_loadu_ps(from)
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: __m256) {
        _mm256_storeu_ps(to, x);
    }
    #[inline(always)]
    unsafe fn load_u16(from: *const u16) -> __m256i {
        _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()))
    }
    #[inline(always)]
    unsafe fn store_u16(to: *mut u16, x: __m256i) {
        // The pack works per 128-bit half: gather its two useful quarters.
        let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(x, x));
        _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(packed));
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m256 {
        _mm256_cvtph_ps(_mm_loadu_si128(from.cast()))
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, x: __m256) {
        _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x));
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        _mm256_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        _mm256_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        _mm256_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        _mm256_div_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sqrt(a: __m256) -> __m256 {
        _mm256_sqrt_ps(a)
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn bits(a: __m256) -> __m256i {
        _mm256_castps_si256(a)
    }
    #[inline(always)]
    unsafe fn float(a: __m256i) -> __m256 {
        _mm256_castsi256_ps(a)
    }
    #[inline(always)]
    unsafe fn and(a: __m256i, b: __m256i) -> __m256i {
        _mm256_and_si256(a, b)
    }
    #[inline(always)]
    unsafe fn or(a: __m256i, b: __m256i) -> __m256i {
        _mm256_or_si256(a, b)
    }
    #[inline(always)]
    unsafe fn add_bits(a: __m256i, b: __m256i) -> __m256i {
        _mm256_add_epi32(a, b)
    }
    #[inline(always)]
    unsafe fn shl16(a: __m256i) -> __m256i {
        _mm256_slli_epi32::<16>(a)
    }
    #[inline(always)]
    unsafe fn shr16(a: __m256i) -> __m256i {
        _mm256_srli_epi32::<16>(a)
    }
    #[inline(always)]
    unsafe fn if_below(a: __m256i, limit: __m256i, yes: __m256i, no: __m256i) -> __m256i {
        _mm256_blendv_epi8(no, yes, _mm256_cmpgt_epi32(limit, a))
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const f32) {
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
}

/// # Safety
/// See [`body::update`]; the CPU has the features below.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn update<G: Read, W: Write>(s: Streams<G, W>, consts: &Consts) {
    body::update::<Avx2, G, W>(s, consts);
}

/// # Safety
/// See [`body::accumulate`]; the CPU has the features below.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn accumulate<G: Read>(sum: *mut f32, addend: *const G::Raw, len: usize) {
    body::accumulate::<Avx2, G>(sum, addend, len);
}

/// # Safety
/// See [`body::convert`]; the CPU has the features below.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn convert<G: Read, W: Write>(from: *const G::Raw, to: *mut W::Raw, len: usize) {
    body::convert::<Avx2, G, W>(from, to, len);
}
