//! The few operations the loops are made of, so that they can be written once for every instruction set.
//!
//! Invariant: each operation is correctly rounded IEEE arithmetic (or plain integer arithmetic) per lane, so lane
//! counts cannot change a result.

/// A register of `LANES` single-precision numbers.
///
/// # Safety
///
/// Contract of every method: the CPU has the instruction set of the implementor, and the call is inlined into a
/// function that enables it (else it is slow, not wrong). Pointers are valid for `LANES` elements, of any alignment
/// their type allows; [`Lanes::prefetch`] takes any address.
pub(super) trait Lanes {
    /// Elements per register; divides [`super::body::LINE`].
    const LANES: usize;
    /// Lanes of `f32`.
    type F: Copy;
    /// Lanes of `u32`.
    type I: Copy;

    /// # Safety
    /// See the trait.
    unsafe fn splat(x: f32) -> Self::F;
    /// # Safety
    /// See the trait.
    unsafe fn splat_bits(x: u32) -> Self::I;

    /// # Safety
    /// See the trait.
    unsafe fn load(from: *const f32) -> Self::F;
    /// # Safety
    /// See the trait.
    unsafe fn store(to: *mut f32, x: Self::F);
    /// Zero-extends.
    /// # Safety
    /// See the trait.
    unsafe fn load_u16(from: *const u16) -> Self::I;
    /// Stores the low halves; the high halves must be zero.
    /// # Safety
    /// See the trait.
    unsafe fn store_u16(to: *mut u16, x: Self::I);
    /// Widens half precision.
    /// # Safety
    /// See the trait.
    unsafe fn load_f16(from: *const u16) -> Self::F;
    /// Rounds to half precision, to nearest even.
    /// # Safety
    /// See the trait.
    unsafe fn store_f16(to: *mut u16, x: Self::F);

    /// # Safety
    /// See the trait.
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    /// # Safety
    /// See the trait.
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    /// # Safety
    /// See the trait.
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// # Safety
    /// See the trait.
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// # Safety
    /// See the trait.
    unsafe fn sqrt(a: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    /// # Safety
    /// See the trait.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;

    /// # Safety
    /// See the trait.
    unsafe fn bits(a: Self::F) -> Self::I;
    /// # Safety
    /// See the trait.
    unsafe fn float(a: Self::I) -> Self::F;
    /// # Safety
    /// See the trait.
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I;
    /// # Safety
    /// See the trait.
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I;
    /// Wrapping addition.
    /// # Safety
    /// See the trait.
    unsafe fn add_bits(a: Self::I, b: Self::I) -> Self::I;
    /// # Safety
    /// See the trait.
    unsafe fn shl16(a: Self::I) -> Self::I;
    /// Logical shift.
    /// # Safety
    /// See the trait.
    unsafe fn shr16(a: Self::I) -> Self::I;
    /// Per lane `a < limit ? yes : no`; `a` and `limit` lie below 2^31.
    /// # Safety
    /// See the trait.
    unsafe fn if_below(a: Self::I, limit: Self::I, yes: Self::I, no: Self::I) -> Self::I;

    /// Hints that the line at this address is needed soon; it need not exist.
    /// # Safety
    /// See the trait.
    unsafe fn prefetch(at: *const f32);
}
