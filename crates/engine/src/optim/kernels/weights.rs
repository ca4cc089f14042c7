//! The forms that weights are kept in, as the loop sees them.

use super::body::prefetch;
use super::element::{Bf16, Element, F32, Read, Write};
use super::lanes::Lanes;
use super::random::{self, WINDOW};

/// Least number of elements to stream: the fence at the end is dear.
const STREAM: usize = 4096;

/// Weights that a loop reads and writes at element `i`.
///
/// # Safety
/// Contract of every method: that of [`Lanes`], for the elements from `i`; [`Weights::prefetch`] takes any `i`.
pub(super) trait Weights {
    /// Whether storing uses its random words.
    const RANDOM: bool;
    /// Whether storing rounds by carrying; see [`random::round`].
    const CARRIES: bool;
    /// Whether stores bypass the caches and need a fence.
    fn streams(&self) -> bool {
        false
    }
    unsafe fn load<L: Lanes>(&self, i: usize) -> L::F;
    /// `whole`: the elements lie in a whole block, `i` being a multiple of `L::LANES`.
    unsafe fn store<L: Lanes>(&self, i: usize, x: L::F, word: L::I, whole: bool);
    /// Hints at a block.
    unsafe fn prefetch<L: Lanes>(&self, i: usize);
}

/// fp32 master weights, and the weights rounded from them.
pub(super) struct Master<W: Write> {
    master: *mut f32,
    weight: *mut W::Raw,
    /// The output has no reader here: whole lines of it go past the caches.
    stream: bool,
}

impl<W: Write> Master<W> {
    pub(super) fn new(master: &mut [f32], weight: *mut W::Raw) -> Self {
        let stream = W::STREAMS && master.len() >= STREAM && weight.addr().is_multiple_of(64);
        Self { master: master.as_mut_ptr(), weight, stream }
    }
}

impl<W: Write> Weights for Master<W> {
    const RANDOM: bool = false;
    const CARRIES: bool = false;
    #[inline(always)]
    fn streams(&self) -> bool {
        self.stream
    }
    #[inline(always)]
    unsafe fn load<L: Lanes>(&self, i: usize) -> L::F {
        // SAFETY: our contract is that of Lanes.
        unsafe { L::load(self.master.add(i)) }
    }
    #[inline(always)]
    unsafe fn store<L: Lanes>(&self, i: usize, x: L::F, _: L::I, whole: bool) {
        // SAFETY: our contract is that of Lanes; in a whole block `i` keeps the alignment that `new` found.
        unsafe {
            L::store(self.master.add(i), x);
            W::store::<L>(self.weight.add(i), x, whole && self.stream);
        }
    }
    #[inline(always)]
    unsafe fn prefetch<L: Lanes>(&self, i: usize) {
        // SAFETY: a hint takes any address.
        unsafe { prefetch::<L, F32>(self.master, i) }
    }
}

/// The master in two halves: the nearest bfloat16, ties away from zero, and the bits that it lacks. Their sum, as
/// integers with a signed low half, is the fp32 master; 16 bits cannot tell a tie that was rounded up to even from one
/// that was rounded down, hence away.
pub(super) struct Split {
    pub(super) high: *mut u16,
    pub(super) low: *mut u16,
}

impl Weights for Split {
    const RANDOM: bool = false;
    const CARRIES: bool = true;
    #[inline(always)]
    unsafe fn load<L: Lanes>(&self, i: usize) -> L::F {
        // SAFETY: our contract is that of Lanes.
        unsafe {
            let low = L::sar16(L::load_high(self.low.add(i)));
            L::float(L::add_bits(L::load_high(self.high.add(i)), low))
        }
    }
    #[inline(always)]
    unsafe fn store<L: Lanes>(&self, i: usize, x: L::F, _: L::I, _: bool) {
        // SAFETY: our contract is that of Lanes.
        unsafe {
            L::store_high(self.high.add(i), random::round::<L>(x, L::splat_bits(0x8000)), false);
            L::store_high(self.low.add(i), L::shl16(L::bits(x)), false);
        }
    }
    #[inline(always)]
    unsafe fn prefetch<L: Lanes>(&self, i: usize) {
        // SAFETY: a hint takes any address.
        unsafe {
            prefetch::<L, Bf16>(self.high, i);
            prefetch::<L, Bf16>(self.low, i);
        }
    }
}

/// bfloat16 weights without a master, rounded stochastically.
pub(super) struct Bare {
    pub(super) weight: *mut <Bf16 as Element>::Raw,
}

impl Weights for Bare {
    const RANDOM: bool = true;
    const CARRIES: bool = true;
    #[inline(always)]
    unsafe fn load<L: Lanes>(&self, i: usize) -> L::F {
        // SAFETY: our contract is that of Lanes.
        unsafe { Bf16::load::<L>(self.weight.add(i)) }
    }
    #[inline(always)]
    unsafe fn store<L: Lanes>(&self, i: usize, x: L::F, word: L::I, _: bool) {
        // SAFETY: our contract is that of Lanes.
        unsafe {
            let window = L::and(L::shr8(word), L::splat_bits(WINDOW));
            L::store_high(self.weight.add(i), random::round::<L>(x, window), false);
        }
    }
    #[inline(always)]
    unsafe fn prefetch<L: Lanes>(&self, i: usize) {
        // SAFETY: a hint takes any address.
        unsafe { prefetch::<L, Bf16>(self.weight, i) }
    }
}
