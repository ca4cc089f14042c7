//! Sixteen lanes: AVX2 with FMA and F16C.
//!
//! Contract: that of [`Lanes`]. The entry points at the end may be called only where the CPU has all of their
//! features; everything else is inlined into them.

#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::x86_64::*;

use super::super::adamw::Consts;
use super::body::{BLOCK, Streams};
use super::element::{Moment, Read, Write};
use super::lanes::Lanes;
use super::reduce;
use super::weights::Weights;

/// 16 elements at a time.
pub(super) enum Avx2 {}

impl Lanes for Avx2 {
    const LANES: usize = 16;
    type F = [__m256; 2];
    type I = [__m256i; 2];
    type Sums = [__m256d; 8];

    #[inline(always)]
    unsafe fn splat(x: f32) -> [__m256; 2] {
        [_mm256_set1_ps(x); 2]
    }
    #[inline(always)]
    unsafe fn splat_bits(x: u32) -> [__m256i; 2] {
        [_mm256_set1_epi32(x.cast_signed()); 2]
    }
    #[inline(always)]
    unsafe fn iota() -> [__m256i; 2] {
        [_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> [__m256; 2] {
        [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))]
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: [__m256; 2]) {
        _mm256_storeu_ps(to, x[0]);
        _mm256_storeu_ps(to.add(8), x[1]);
    }
    #[inline(always)]
    unsafe fn load_high(from: *const u16) -> [__m256i; 2] {
        let from = from.cast::<__m128i>();
        let wide = [_mm256_cvtepu16_epi32(_mm_loadu_si128(from)), _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(1)))];
        Self::shl16(wide)
    }
    #[inline(always)]
    unsafe fn store_high(to: *mut u16, x: [__m256i; 2], stream: bool) {
        let low = Self::shr16(x);
        // The pack works per 128-bit half: put its quarters in order.
        let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low[0], low[1]));
        match stream {
            true => _mm256_stream_si256(to.cast(), packed),
            false => _mm256_storeu_si256(to.cast(), packed),
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> [__m256; 2] {
        let from = from.cast::<__m128i>();
        [_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from.add(1)))]
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, x: [__m256; 2], stream: bool) {
        let half = both!(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>, x);
        let packed = _mm256_set_m128i(half[1], half[0]);
        match stream {
            true => _mm256_stream_si256(to.cast(), packed),
            false => _mm256_storeu_si256(to.cast(), packed),
        }
    }
    #[inline(always)]
    unsafe fn add(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_add_ps, a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_sub_ps, a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_mul_ps, a, b)
    }
    #[inline(always)]
    unsafe fn div(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_div_ps, a, b)
    }
    #[inline(always)]
    unsafe fn sqrt(a: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_sqrt_ps, a)
    }
    #[inline(always)]
    unsafe fn fma(a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_fmadd_ps, a, b, c)
    }
    #[inline(always)]
    unsafe fn max(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_max_ps, a, b)
    }
    #[inline(always)]
    unsafe fn bits(a: [__m256; 2]) -> [__m256i; 2] {
        both!(_mm256_castps_si256, a)
    }
    #[inline(always)]
    unsafe fn float(a: [__m256i; 2]) -> [__m256; 2] {
        both!(_mm256_castsi256_ps, a)
    }
    #[inline(always)]
    unsafe fn and(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        both!(_mm256_and_si256, a, b)
    }
    #[inline(always)]
    unsafe fn or(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        both!(_mm256_or_si256, a, b)
    }
    #[inline(always)]
    unsafe fn xor(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        both!(_mm256_xor_si256, a, b)
    }
    #[inline(always)]
    unsafe fn add_bits(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        both!(_mm256_add_epi32, a, b)
    }
    #[inline(always)]
    unsafe fn mul_bits(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        both!(_mm256_mullo_epi32, a, b)
    }
    #[inline(always)]
    unsafe fn shl16(a: [__m256i; 2]) -> [__m256i; 2] {
        both!(_mm256_slli_epi32::<16>, a)
    }
    #[inline(always)]
    unsafe fn shr8(a: [__m256i; 2]) -> [__m256i; 2] {
        both!(_mm256_srli_epi32::<8>, a)
    }
    #[inline(always)]
    unsafe fn shr15(a: [__m256i; 2]) -> [__m256i; 2] {
        both!(_mm256_srli_epi32::<15>, a)
    }
    #[inline(always)]
    unsafe fn shr16(a: [__m256i; 2]) -> [__m256i; 2] {
        both!(_mm256_srli_epi32::<16>, a)
    }
    #[inline(always)]
    unsafe fn sar16(a: [__m256i; 2]) -> [__m256i; 2] {
        both!(_mm256_srai_epi32::<16>, a)
    }
    #[inline(always)]
    unsafe fn keep_if_any(a: [__m256i; 2], mask: [__m256i; 2]) -> [__m256i; 2] {
        let none = both!(_mm256_cmpeq_epi32, Self::and(a, mask), [_mm256_setzero_si256(); 2]);
        both!(_mm256_andnot_si256, none, a)
    }
    #[inline(always)]
    unsafe fn drop_below(x: [__m256; 2], limit: [__m256; 2]) -> [__m256; 2] {
        let size = both!(_mm256_andnot_ps, [_mm256_set1_ps(-0.0); 2], x);
        let kept = both!(_mm256_cmp_ps::<_CMP_NLT_UQ>, size, limit);
        both!(_mm256_and_ps, kept, x)
    }
    #[inline(always)]
    unsafe fn if_nan(x: [__m256; 2], yes: [__m256i; 2], no: [__m256i; 2]) -> [__m256i; 2] {
        let nan = both!(_mm256_cmp_ps::<_CMP_UNORD_Q>, x, x);
        both!(_mm256_blendv_epi8, no, yes, Self::bits(nan))
    }
    #[inline(always)]
    unsafe fn no_sums() -> [__m256d; 8] {
        [_mm256_setzero_pd(); 8]
    }
    #[inline(always)]
    unsafe fn add_squares(sums: &mut [__m256d; 8], at: usize, x: [__m256; 2]) {
        for (sums, x) in sums[at / 4..at / 4 + 4].chunks_exact_mut(2).zip(x) {
            let low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
            let high = _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(x));
            sums[0] = _mm256_fmadd_pd(low, low, sums[0]);
            sums[1] = _mm256_fmadd_pd(high, high, sums[1]);
        }
    }
    #[inline(always)]
    unsafe fn add_squares_bf16(sums: &mut [__m256d; 8], at: usize, from: *const u16) {
        let packed = _mm256_loadu_si256(from.cast());
        let evens = _mm256_slli_epi32::<16>(packed);
        let odds = _mm256_and_si256(packed, _mm256_set1_epi32(!0xffff));
        Self::add_squares(sums, at, [_mm256_castsi256_ps(evens), _mm256_castsi256_ps(odds)]);
    }
    #[inline(always)]
    unsafe fn store_sums(sums: &[__m256d; 8]) -> [f64; BLOCK] {
        let mut out = [0.0; BLOCK];
        for (to, &from) in out.chunks_exact_mut(4).zip(sums) {
            _mm256_storeu_pd(to.as_mut_ptr(), from);
        }
        out
    }
    #[inline(always)]
    unsafe fn prefetch<T>(at: *const T) {
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
    #[inline(always)]
    unsafe fn fence() {
        _mm_sfence();
    }
}

/// # Safety
/// See [`Streams::update`]; the CPU has the features below.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn update<K: Weights, M: Moment, G: Read>(s: Streams<K, M, G>, consts: &Consts) {
    s.update::<Avx2>(consts);
}

/// # Safety
/// See [`Streams::probe`]; the CPU has the features below.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn probe<K: Weights, M: Moment, G: Read>(s: Streams<K, M, G>) {
    s.probe::<Avx2>();
}

/// # Safety
/// See [`reduce::accumulate`]; the CPU has the features below.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn accumulate<G: Read>(sum: *mut f32, addend: *const G::Raw, len: usize) -> f64 {
    reduce::accumulate::<Avx2, G>(sum, addend, len)
}

/// # Safety
/// See [`reduce::squares`]; the CPU has the features below.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn squares<G: Read>(from: *const G::Raw, len: usize) -> f64 {
    reduce::squares::<Avx2, G>(from, len)
}

/// # Safety
/// See [`reduce::read`]; the CPU has the features below.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn read<G: Read>(from: *const G::Raw, len: usize) -> u32 {
    reduce::read::<Avx2, G>(from, len)
}

/// # Safety
/// See [`reduce::convert`]; the CPU has the features below.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn convert<G: Read, W: Write>(from: *const G::Raw, to: *mut W::Raw, len: usize) {
    reduce::convert::<Avx2, G, W>(from, to, len);
}
