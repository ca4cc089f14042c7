//! The few operations the loops are made of, so that they can be written once for every instruction set.
//!
//! Invariant: each operation is correctly rounded IEEE arithmetic (or plain integer arithmetic) per lane, so lane
//! counts cannot change a result.

use super::body::BLOCK;

/// A group of `LANES` single-precision numbers; more than one register, so that 16-bit elements fill whole ones.
///
/// # Safety
///
/// Contract of every method: the CPU has the instruction set of the implementor, and the call is inlined into a
/// function that enables it (else it is slow, not wrong). Pointers are valid for `LANES` elements, of any alignment
/// their type allows; [`Lanes::prefetch`] takes any address.
pub(super) trait Lanes {
    /// Elements at a time; divides [`BLOCK`].
    const LANES: usize;
    /// Lanes of `f32`.
    type F: Copy;
    /// Lanes of `u32`.
    type I: Copy;
    /// [`BLOCK`] sums in `f64`.
    type Sums: Copy;

    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn splat_bits(x: u32) -> Self::I;
    /// 0, 1, 2, …
    unsafe fn iota() -> Self::I;

    unsafe fn load(from: *const f32) -> Self::F;
    unsafe fn store(to: *mut f32, x: Self::F);
    /// 16-bit elements as high halves; the low ones are zero.
    unsafe fn load_high(from: *const u16) -> Self::I;
    /// Stores the high halves. With `stream` past the caches; then `to` is aligned to all of them.
    unsafe fn store_high(to: *mut u16, x: Self::I, stream: bool);
    /// Widens half precision.
    unsafe fn load_f16(from: *const u16) -> Self::F;
    /// Rounds to half precision, to nearest even; `stream` as in [`Lanes::store_high`].
    unsafe fn store_f16(to: *mut u16, x: Self::F, stream: bool);

    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sqrt(a: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Per lane `a > b ? a : b`, which is `b` where either is NaN.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;

    unsafe fn bits(a: Self::F) -> Self::I;
    unsafe fn float(a: Self::I) -> Self::F;
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn xor(a: Self::I, b: Self::I) -> Self::I;
    /// Wrapping.
    unsafe fn add_bits(a: Self::I, b: Self::I) -> Self::I;
    /// Wrapping, the low 32 bits.
    unsafe fn mul_bits(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn shl16(a: Self::I) -> Self::I;
    /// Logical, by 8.
    unsafe fn shr8(a: Self::I) -> Self::I;
    /// Logical, by 15.
    unsafe fn shr15(a: Self::I) -> Self::I;
    /// Logical, by 16.
    unsafe fn shr16(a: Self::I) -> Self::I;
    /// Arithmetic, by 16.
    unsafe fn sar16(a: Self::I) -> Self::I;
    /// Per lane `a & mask != 0 ? a : 0`.
    unsafe fn keep_if_any(a: Self::I, mask: Self::I) -> Self::I;
    /// Per lane `|x| < limit ? 0 : x`; a NaN stays.
    unsafe fn drop_below(x: Self::F, limit: Self::F) -> Self::F;
    /// Per lane `x is NaN ? yes : no`.
    unsafe fn if_nan(x: Self::F, yes: Self::I, no: Self::I) -> Self::I;

    /// All zero.
    unsafe fn no_sums() -> Self::Sums;
    /// Adds the squares of `x`, exact in `f64`, to the sums from `at`, a multiple of `LANES`.
    unsafe fn add_squares(sums: &mut Self::Sums, at: usize, x: Self::F);
    /// The same for bfloat16 in memory, where evens and odds unpack without a shuffle: of every 16 elements the evens go
    /// to the first 8 sums, the odds to the others.
    unsafe fn add_squares_bf16(sums: &mut Self::Sums, at: usize, from: *const u16);
    unsafe fn store_sums(sums: &Self::Sums) -> [f64; BLOCK];

    /// Hints that the line at this address is needed soon; it need not exist.
    unsafe fn prefetch<T>(at: *const T);
    /// Orders streamed stores before all that follows.
    unsafe fn fence();
}
