//! Element types as the generic loops see them: how one register of them is read and written.

use super::lanes::Lanes;

/// A type of element in memory.
pub(super) trait Element {
    /// How one element is stored.
    type Raw;
    /// Single precision: the streams worth a software prefetch.
    const WIDE: bool = false;
}

/// Elements that can be widened.
pub(super) trait Read: Element {
    /// # Safety
    /// As [`Lanes`]: the CPU has `L`, and `from` is readable for `L::LANES` elements.
    unsafe fn load<L: Lanes>(from: *const Self::Raw) -> L::F;
}

/// Elements that can be rounded to.
pub(super) trait Write: Element {
    /// # Safety
    /// As [`Lanes`]: the CPU has `L`, and `to` is writable for `L::LANES` elements.
    unsafe fn store<L: Lanes>(to: *mut Self::Raw, x: L::F);
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
    const WIDE: bool = true;
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
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const f32) -> L::F {
        // SAFETY: our contract is that of Lanes.
        unsafe { L::load(from) }
    }
}

impl Write for F32 {
    #[inline(always)]
    unsafe fn store<L: Lanes>(to: *mut f32, x: L::F) {
        // SAFETY: our contract is that of Lanes.
        unsafe { L::store(to, x) }
    }
}

impl Read for Bf16 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u16) -> L::F {
        // SAFETY: our contract is that of Lanes.
        unsafe { L::float(L::shl16(L::load_u16(from))) }
    }
}

impl Write for Bf16 {
    // In integers: vcvtneps2bf16 would flush denormals.
    #[inline(always)]
    unsafe fn store<L: Lanes>(to: *mut u16, x: L::F) {
        // SAFETY: our contract is that of Lanes.
        unsafe {
            let bits = L::bits(x);
            let upper = L::shr16(bits);
            let odd = L::and(upper, L::splat_bits(1));
            let rounded = L::shr16(L::add_bits(bits, L::add_bits(odd, L::splat_bits(0x7fff))));
            let quiet = L::or(upper, L::splat_bits(0x40));
            let magnitude = L::and(bits, L::splat_bits(0x7fff_ffff));
            let past_infinity = L::splat_bits(0x7f80_0001);
            L::store_u16(to, L::if_below(magnitude, past_infinity, rounded, quiet));
        }
    }
}

impl Read for F16 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u16) -> L::F {
        // SAFETY: our contract is that of Lanes.
        unsafe { L::load_f16(from) }
    }
}

impl Write for F16 {
    #[inline(always)]
    unsafe fn store<L: Lanes>(to: *mut u16, x: L::F) {
        // SAFETY: our contract is that of Lanes.
        unsafe { L::store_f16(to, x) }
    }
}

impl Write for Nothing {
    #[inline(always)]
    unsafe fn store<L: Lanes>(_: *mut (), _: L::F) {}
}
