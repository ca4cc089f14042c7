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
    /// Counter of lane 0 less its element's index in the chunk; then the key of the second round.
    start: u32,
    key: L::I,
    lanes: L::I,
}

impl<L: Lanes> Words<L> {
    /// # Safety
    /// The CPU has `L`.
    #[inline(always)]
    pub(super) unsafe fn new(noise: Noise) -> Self {
        // SAFETY: our contract is that of Lanes.
        unsafe { Self { start: noise.counter, key: L::splat_bits(noise.key), lanes: L::iota() } }
    }

    /// The words of the group of elements from `i`; [`Noise::word`] is the same for one.
    ///
    /// # Safety
    /// The CPU has `L`.
    #[inline(always)]
    pub(super) unsafe fn at(&self, i: usize) -> L::I {
        // SAFETY: our contract is that of Lanes.
        unsafe {
            let x = L::add_bits(L::splat_bits(self.start.wrapping_add(i as u32)), self.lanes);
            let x = L::xor(x, L::shr16(x));
            let x = L::xor(L::mul_bits(x, L::splat_bits(Noise::FACTORS[0])), self.key);
            let x = L::xor(x, L::shr15(x));
            let x = L::mul_bits(x, L::splat_bits(Noise::FACTORS[1]));
            L::xor(x, L::shr16(x))
        }
    }
}

/// The bits of `x` with a high half rounded to bfloat16 stochastically, by 16 random `bits` per lane. `x` comes out of
/// arithmetic: if it is a NaN it is a quiet one, which stays as it is; adding to it could carry into the sign.
///
/// # Safety
/// The CPU has `L`.
#[inline(always)]
pub(super) unsafe fn round<L: Lanes>(x: L::F, bits: L::I) -> L::I {
    // SAFETY: our contract is that of Lanes.
    unsafe { L::if_nan(x, L::bits(x), L::add_bits(L::bits(x), bits)) }
}
