//! Thirty-two lanes: AVX-512 F, BW and VL.
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

/// 32 elements at a time.
pub(super) enum Avx512 {}

/// For every 32-bit lane of a group, its high half within 32 packed elements, with the low halves masked.
const SPREAD: [[u16; 32]; 2] = {
    let mut to = [[0; 32]; 2];
    let mut i = 0;
    while i < 32 {
        to[i / 16][i % 16 * 2 + 1] = i as u16;
        i += 1;
    }
    to
};
const HIGH: __mmask32 = 0xaaaa_aaaa;
/// The high halves of both registers in order.
const GATHER: [u16; 32] = {
    let mut from = [0; 32];
    let mut i = 0;
    while i < 32 {
        from[i] = 2 * i as u16 + 1;
        i += 1;
    }
    from
};

#[inline(always)]
unsafe fn add_eight(sums: &mut __m512d, x: __m256) {
    let x = _mm512_cvtps_pd(x);
    *sums = _mm512_fmadd_pd(x, x, *sums);
}

impl Lanes for Avx512 {
    const LANES: usize = 32;
    type F = [__m512; 2];
    type I = [__m512i; 2];
    type Sums = [__m512d; 4];

    #[inline(always)]
    unsafe fn splat(x: f32) -> [__m512; 2] {
        [_mm512_set1_ps(x); 2]
    }
    #[inline(always)]
    unsafe fn splat_bits(x: u32) -> [__m512i; 2] {
        [_mm512_set1_epi32(x.cast_signed()); 2]
    }
    #[inline(always)]
    unsafe fn iota() -> [__m512i; 2] {
        let low = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        [low, _mm512_add_epi32(low, _mm512_set1_epi32(16))]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> [__m512; 2] {
        [_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16))]
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, x: [__m512; 2]) {
        _mm512_storeu_ps(to, x[0]);
        _mm512_storeu_ps(to.add(16), x[1]);
    }
    #[inline(always)]
    unsafe fn load_high(from: *const u16) -> [__m512i; 2] {
        let packed = _mm512_loadu_si512(from.cast());
        [
            _mm512_maskz_permutexvar_epi16(HIGH, _mm512_loadu_si512(SPREAD[0].as_ptr().cast()), packed),
            _mm512_maskz_permutexvar_epi16(HIGH, _mm512_loadu_si512(SPREAD[1].as_ptr().cast()), packed),
        ]
    }
    #[inline(always)]
    unsafe fn store_high(to: *mut u16, x: [__m512i; 2], stream: bool) {
        let packed = _mm512_permutex2var_epi16(x[0], _mm512_loadu_si512(GATHER.as_ptr().cast()), x[1]);
        match stream {
            true => _mm512_stream_si512(to.cast(), packed),
            false => _mm512_storeu_si512(to.cast(), packed),
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> [__m512; 2] {
        let from = from.cast::<__m256i>();
        [_mm512_cvtph_ps(_mm256_loadu_si256(from)), _mm512_cvtph_ps(_mm256_loadu_si256(from.add(1)))]
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, x: [__m512; 2], stream: bool) {
        let half = both!(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>, x);
        let packed = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(half[0]), half[1]);
        match stream {
            true => _mm512_stream_si512(to.cast(), packed),
            false => _mm512_storeu_si512(to.cast(), packed),
        }
    }
    #[inline(always)]
    unsafe fn add(a: [__m512; 2], b: [__m512; 2]) -> [__m512; 2] {
        both!(_mm512_add_ps, a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: [__m512; 2], b: [__m512; 2]) -> [__m512; 2] {
        both!(_mm512_sub_ps, a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: [__m512; 2], b: [__m512; 2]) -> [__m512; 2] {
        both!(_mm512_mul_ps, a, b)
    }
    #[inline(always)]
    unsafe fn div(a: [__m512; 2], b: [__m512; 2]) -> [__m512; 2] {
        both!(_mm512_div_ps, a, b)
    }
    #[inline(always)]
    unsafe fn sqrt(a: [__m512; 2]) -> [__m512; 2] {
        both!(_mm512_sqrt_ps, a)
    }
    #[inline(always)]
    unsafe fn fma(a: [__m512; 2], b: [__m512; 2], c: [__m512; 2]) -> [__m512; 2] {
        both!(_mm512_fmadd_ps, a, b, c)
    }
    #[inline(always)]
    unsafe fn max(a: [__m512; 2], b: [__m512; 2]) -> [__m512; 2] {
        both!(_mm512_max_ps, a, b)
    }
    #[inline(always)]
    unsafe fn bits(a: [__m512; 2]) -> [__m512i; 2] {
        both!(_mm512_castps_si512, a)
    }
    #[inline(always)]
    unsafe fn float(a: [__m512i; 2]) -> [__m512; 2] {
        both!(_mm512_castsi512_ps, a)
    }
    #[inline(always)]
    unsafe fn and(a: [__m512i; 2], b: [__m512i; 2]) -> [__m512i; 2] {
        both!(_mm512_and_si512, a, b)
    }
    #[inline(always)]
    unsafe fn or(a: [__m512i; 2], b: [__m512i; 2]) -> [__m512i; 2] {
        both!(_mm512_or_si512, a, b)
    }
    #[inline(always)]
    unsafe fn xor(a: [__m512i; 2], b: [__m512i; 2]) -> [__m512i; 2] {
        both!(_mm512_xor_si512, a, b)
    }
    #[inline(always)]
    unsafe fn add_bits(a: [__m512i; 2], b: [__m512i; 2]) -> [__m512i; 2] {
        both!(_mm512_add_epi32, a, b)
    }
    #[inline(always)]
    unsafe fn mul_bits(a: [__m512i; 2], b: [__m512i; 2]) -> [__m512i; 2] {
        both!(_mm512_mullo_epi32, a, b)
    }
    #[inline(always)]
    unsafe fn shl16(a: [__m512i; 2]) -> [__m512i; 2] {
        both!(_mm512_slli_epi32::<16>, a)
    }
    #[inline(always)]
    unsafe fn shr8(a: [__m512i; 2]) -> [__m512i; 2] {
        both!(_mm512_srli_epi32::<8>, a)
    }
    #[inline(always)]
    unsafe fn shr15(a: [__m512i; 2]) -> [__m512i; 2] {
        both!(_mm512_srli_epi32::<15>, a)
    }
    #[inline(always)]
    unsafe fn shr16(a: [__m512i; 2]) -> [__m512i; 2] {
        both!(_mm512_srli_epi32::<16>, a)
    }
    #[inline(always)]
    unsafe fn sar16(a: [__m512i; 2]) -> [__m512i; 2] {
        both!(_mm512_srai_epi32::<16>, a)
    }
    #[inline(always)]
    unsafe fn keep_if_any(a: [__m512i; 2], mask: [__m512i; 2]) -> [__m512i; 2] {
        let any = both!(_mm512_test_epi32_mask, a, mask);
        both!(_mm512_maskz_mov_epi32, any, a)
    }
    #[inline(always)]
    unsafe fn drop_below(x: [__m512; 2], limit: [__m512; 2]) -> [__m512; 2] {
        let size = both!(_mm512_abs_ps, x);
        let kept = both!(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>, size, limit);
        both!(_mm512_maskz_mov_ps, kept, x)
    }
    #[inline(always)]
    unsafe fn if_nan(x: [__m512; 2], yes: [__m512i; 2], no: [__m512i; 2]) -> [__m512i; 2] {
        let nan = both!(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>, x, x);
        both!(_mm512_mask_blend_epi32, nan, no, yes)
    }
    #[inline(always)]
    unsafe fn no_sums() -> [__m512d; 4] {
        [_mm512_setzero_pd(); 4]
    }
    #[inline(always)]
    unsafe fn add_squares(sums: &mut [__m512d; 4], at: usize, x: [__m512; 2]) {
        let _ = at; // always 0
        for (sums, x) in sums.chunks_exact_mut(2).zip(x) {
            let upper = _mm512_extracti64x4_epi64::<1>(_mm512_castps_si512(x));
            add_eight(&mut sums[0], _mm512_castps512_ps256(x));
            add_eight(&mut sums[1], _mm256_castsi256_ps(upper));
        }
    }
    #[inline(always)]
    unsafe fn add_squares_bf16(sums: &mut [__m512d; 4], at: usize, from: *const u16) {
        let _ = at; // always 0
        for (half, sums) in sums.chunks_exact_mut(2).enumerate() {
            let packed = _mm256_loadu_si256(from.cast::<__m256i>().add(half));
            let odds = _mm256_and_si256(packed, _mm256_set1_epi32(!0xffff));
            add_eight(&mut sums[0], _mm256_castsi256_ps(_mm256_slli_epi32::<16>(packed)));
            add_eight(&mut sums[1], _mm256_castsi256_ps(odds));
        }
    }
    #[inline(always)]
    unsafe fn store_sums(sums: &[__m512d; 4]) -> [f64; BLOCK] {
        let mut out = [0.0; BLOCK];
        for (to, &from) in out.chunks_exact_mut(8).zip(sums) {
            _mm512_storeu_pd(to.as_mut_ptr(), from);
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
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn update<K: Weights, M: Moment, G: Read>(s: Streams<K, M, G>, consts: &Consts) {
    s.update::<Avx512>(consts);
}

/// # Safety
/// See [`Streams::probe`]; the CPU has the features below.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn probe<K: Weights, M: Moment, G: Read>(s: Streams<K, M, G>) {
    s.probe::<Avx512>();
}

/// # Safety
/// See [`reduce::accumulate`]; the CPU has the features below.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn accumulate<G: Read>(sum: *mut f32, addend: *const G::Raw, len: usize) -> f64 {
    reduce::accumulate::<Avx512, G>(sum, addend, len)
}

/// # Safety
/// See [`reduce::squares`]; the CPU has the features below.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn squares<G: Read>(from: *const G::Raw, len: usize) -> f64 {
    reduce::squares::<Avx512, G>(from, len)
}

/// # Safety
/// See [`reduce::read`]; the CPU has the features below.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn read<G: Read>(from: *const G::Raw, len: usize) -> u32 {
    reduce::read::<Avx512, G>(from, len)
}

/// # Safety
/// See [`reduce::convert`]; the CPU has the features below.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn convert<G: Read, W: Write>(from: *const G::Raw, to: *mut W::Raw, len: usize) {
    reduce::convert::<Avx512, G, W>(from, to, len);
}
