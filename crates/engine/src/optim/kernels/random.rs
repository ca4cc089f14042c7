//! Random bits from a counter, and rounding with them.
//!
//! One word of 32 bits serves an element: exp_avg takes bits 0 to 15, exp_avg_sq 16 to 31 and a weight 8 to 23. Each
//! window is uniform, so each rounding is unbiased; the windows' overlap only touches the less decisive bits.

use super::super::noise::Noise;
use super::lanes::Lanes;

/// Mask of one window.
pub(super) const WINDOW: u32 = 0xffff;

/// [`Noise`] for a whole chunk.
pub(super) struct Words<L: Lanes> {
    counter: u32,
    key: L::I,
    /// Distance of each lane from the first.
    lanes: L::I,
}

impl<L: Lanes> Words<L> {
    /// # Safety
    /// The CPU has `L`.
    #[inline(always)]
    pub(super) unsafe fn new(noise: Noise) -> Self {
        // SAFETY: our contract is that of Lanes.
        unsafe {
            let lanes = L::mul_bits(L::iota(), L::splat_bits(Noise::STRIDE));
            Self { counter: noise.counter, key: L::splat_bits(noise.key), lanes }
        }
    }

    /// The words of the group of elements from `i`; [`Noise::word`] is the same for one.
    ///
    /// # Safety
    /// The CPU has `L`.
    #[inline(always)]
    pub(super) unsafe fn at(&self, i: usize) -> L::I {
        // SAFETY: our contract is that of Lanes.
        unsafe {
            let first = self.counter.wrapping_add(i as u32).wrapping_mul(Noise::STRIDE);
            let x = L::add_bits(L::splat_bits(first), self.lanes);
            let x = L::xor(L::xor(x, L::shr16(x)), self.key);
            let x = L::mul_bits(x, L::splat_bits(Noise::FACTOR));
            L::xor(x, L::shr15(x))
        }
    }
}

/// The bits of `x` with a high half rounded to bfloat16 by adding 16 `bits` per lane. A NaN whose low half is zero, as
/// [`quiet`] leaves them, stays one: nothing carries.
///
/// # Safety
/// The CPU has `L`.
#[inline(always)]
pub(super) unsafe fn round<L: Lanes>(x: L::F, bits: L::I) -> L::I {
    // SAFETY: our contract is that of Lanes.
    unsafe { L::add_bits(L::bits(x), bits) }
}

/// Replaces NaNs by the quiet one without a payload. Arithmetic hands payloads on; see [`round`].
///
/// # Safety
/// The CPU has `L`.
#[inline(always)]
pub(super) unsafe fn quiet<L: Lanes>(x: L::F) -> L::F {
    // SAFETY: our contract is that of Lanes.
    unsafe { L::float(L::if_nan(x, L::splat_bits(0x7fc0_0000), L::bits(x))) }
}
