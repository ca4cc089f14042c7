//! Element types as the generic loops see them: how a group of them is read and written.

use super::lanes::Lanes;
use super::random;

/// A type of element in memory.
pub(super) trait Element {
    /// How one element is stored.
    type Raw;
}

/// Elements that can be widened.
pub(super) trait Read: Element {
    /// Whether a NaN can have bits in the low half of single precision.
    const PAYLOAD: bool;
    /// # Safety
    /// As [`Lanes`]: the CPU has `L`, and `from` is readable for `L::LANES` elements.
    unsafe fn load<L: Lanes>(from: *const Self::Raw) -> L::F;
    /// Adds the squares of a group that starts at `at` within its block.
    ///
    /// # Safety
    /// As [`Read::load`].
    #[inline(always)]
    unsafe fn add_squares<L: Lanes>(sums: &mut L::Sums, at: usize, from: *const Self::Raw) {
        // SAFETY: our contract is that of Lanes.
        unsafe { L::add_squares(sums, at, Self::load::<L>(from)) }
    }
}

/// Elements that can be rounded to, to nearest even.
pub(super) trait Write: Element {
    /// Whether [`Write::store`] can go past the caches.
    const STREAMS: bool;
    /// With `stream` 16-bit elements go past the caches: nobody reads them here.
    ///
    /// # Safety
    /// As [`Lanes`]: the CPU has `L`, and `to` is writable for `L::LANES` elements and, with `stream`, aligned to them.
    unsafe fn store<L: Lanes>(to: *mut Self::Raw, x: L::F, stream: bool);
}

/// Elements a moment can be kept in.
pub(super) trait Moment: Read {
    /// Whether [`Moment::round`] uses its bits.
    const RANDOM: bool;
    /// Stores `x`, rounded by 16 random `bits` per lane where it does not fit.
    ///
    /// # Safety
    /// As [`Write::store`].
    unsafe fn round<L: Lanes>(to: *mut Self::Raw, x: L::F, bits: L::I);
    /// Stores `x`, rounded to nearest.
    ///
    /// # Safety
    /// As [`Write::store`].
    unsafe fn nearest<L: Lanes>(to: *mut Self::Raw, x: L::F);
}

/// Single precision.
pub(super) enum F32 {}
/// bfloat16.
pub(super) enum Bf16 {}
/// Half precision.
pub(super) enum F16 {}
/// No stream at all: writes vanish.
pub(super) enum Nothing {}

impl Element for F32 {
    type Raw = f32;
}
impl Element for Bf16 {
    type Raw = u16;
}
impl Element for F16 {
    type Raw = u16;
}
impl Element for Nothing {
    type Raw = ();
}

impl Read for F32 {
    const PAYLOAD: bool = true;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const f32) -> L::F {
        // SAFETY: our contract is that of Lanes.
        unsafe { L::load(from) }
    }
}

impl Write for F32 {
    const STREAMS: bool = false;
    #[inline(always)]
    unsafe fn store<L: Lanes>(to: *mut f32, x: L::F, _: bool) {
        // SAFETY: our contract is that of Lanes.
        unsafe { L::store(to, x) }
    }
}

impl Moment for F32 {
    const RANDOM: bool = false;
    #[inline(always)]
    unsafe fn round<L: Lanes>(to: *mut f32, x: L::F, _: L::I) {
        // SAFETY: our contract is that of Lanes.
        unsafe { L::store(to, x) }
    }
    #[inline(always)]
    unsafe fn nearest<L: Lanes>(to: *mut f32, x: L::F) {
        // SAFETY: our contract is that of Lanes.
        unsafe { L::store(to, x) }
    }
}

impl Read for Bf16 {
    const PAYLOAD: bool = false;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u16) -> L::F {
        // SAFETY: our contract is that of Lanes.
        unsafe { L::float(L::load_high(from)) }
    }
    #[inline(always)]
    unsafe fn add_squares<L: Lanes>(sums: &mut L::Sums, at: usize, from: *const u16) {
        // SAFETY: our contract is that of Lanes.
        unsafe { L::add_squares_bf16(sums, at, from) }
    }
}

impl Write for Bf16 {
    const STREAMS: bool = true;
    // In integers: vcvtneps2bf16 would flush denormals.
    #[inline(always)]
    unsafe fn store<L: Lanes>(to: *mut u16, x: L::F, stream: bool) {
        // SAFETY: our contract is that of Lanes.
        unsafe {
            let bits = L::bits(x);
            let odd = L::and(L::shr16(bits), L::splat_bits(1));
            let rounded = L::add_bits(bits, L::add_bits(odd, L::splat_bits(0x7fff)));
            // Rounding a NaN could carry into the sign, and cutting a signalling one could leave infinity.
            let quiet = L::or(bits, L::splat_bits(0x40_0000));
            L::store_high(to, L::if_nan(x, quiet, rounded), stream);
        }
    }
}

impl Moment for Bf16 {
    const RANDOM: bool = true;
    #[inline(always)]
    unsafe fn round<L: Lanes>(to: *mut u16, x: L::F, bits: L::I) {
        // SAFETY: our contract is that of Lanes.
        unsafe { L::store_high(to, random::round::<L>(x, bits), false) }
    }
    #[inline(always)]
    unsafe fn nearest<L: Lanes>(to: *mut u16, x: L::F) {
        // SAFETY: our contract is that of Lanes.
        unsafe { Self::store::<L>(to, x, false) }
    }
}

impl Read for F16 {
    const PAYLOAD: bool = true;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u16) -> L::F {
        // SAFETY: our contract is that of Lanes.
        unsafe { L::load_f16(from) }
    }
}

impl Write for F16 {
    const STREAMS: bool = true;
    #[inline(always)]
    unsafe fn store<L: Lanes>(to: *mut u16, x: L::F, stream: bool) {
        // SAFETY: our contract is that of Lanes.
        unsafe { L::store_f16(to, x, stream) }
    }
}

impl Write for Nothing {
    const STREAMS: bool = false;
    #[inline(always)]
    unsafe fn store<L: Lanes>(_: *mut (), _: L::F, _: bool) {}
}
