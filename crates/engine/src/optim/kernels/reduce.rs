//! Loops over one or two streams: sums of squares, accumulation and conversion.

use super::body::{BLOCK, prefetch};
use super::element::{F32, Read, Write};
use super::lanes::Lanes;
use super::scalar::Scalar;

/// How far ahead to prefetch, in elements.
const AHEAD: usize = 4096;

/// Where squares come from.
trait Terms {
    /// Hints at a block.
    ///
    /// # Safety
    /// The CPU has `L`.
    unsafe fn prefetch<L: Lanes>(&self, i: usize);
    /// Adds the squares of the group of elements from `i`, which starts at `at` within its block.
    ///
    /// # Safety
    /// The CPU has `L`; the elements exist, and each is asked for once.
    unsafe fn add<L: Lanes>(&self, sums: &mut L::Sums, at: usize, i: usize);
}

/// As they are.
struct Plain<G: Read>(*const G::Raw);

impl<G: Read> Terms for Plain<G> {
    #[inline(always)]
    unsafe fn prefetch<L: Lanes>(&self, i: usize) {
        // SAFETY: our contract.
        unsafe { prefetch::<L, G>(self.0, i) }
    }
    #[inline(always)]
    unsafe fn add<L: Lanes>(&self, sums: &mut L::Sums, at: usize, i: usize) {
        // SAFETY: our contract.
        unsafe { G::add_squares::<L>(sums, at, self.0.add(i)) }
    }
}

/// `sum += addend`, and that is the term.
struct Added<G: Read> {
    sum: *mut f32,
    addend: *const G::Raw,
}

impl<G: Read> Terms for Added<G> {
    #[inline(always)]
    unsafe fn prefetch<L: Lanes>(&self, i: usize) {
        // SAFETY: our contract.
        unsafe {
            prefetch::<L, F32>(self.sum, i);
            prefetch::<L, G>(self.addend, i);
        }
    }
    #[inline(always)]
    unsafe fn add<L: Lanes>(&self, sums: &mut L::Sums, at: usize, i: usize) {
        // SAFETY: our contract.
        unsafe {
            let x = L::add(L::load(self.sum.add(i)), G::load::<L>(self.addend.add(i)));
            L::store(self.sum.add(i), x);
            L::add_squares(sums, at, x);
        }
    }
}

/// The sum of squares in `f64`: elements at the same place in their block share a sum, then those are added in a fixed
/// order.
///
/// # Safety
/// The CPU has `L`; the terms have `len` elements.
#[inline(always)]
unsafe fn sum_squares<L: Lanes>(terms: &impl Terms, len: usize) -> f64 {
    let whole = len - len % BLOCK;
    // SAFETY: `at` is a multiple of LANES below BLOCK; every element exists.
    unsafe {
        let mut sums = L::no_sums();
        for block in (0..whole).step_by(BLOCK) {
            terms.prefetch::<L>(block + AHEAD);
            for at in (0..BLOCK).step_by(L::LANES) {
                terms.add::<L>(&mut sums, at, block + at);
            }
        }
        let mut sums = L::store_sums(&sums);
        for i in whole..len {
            terms.add::<Scalar>(&mut sums, i - whole, i);
        }
        let mut half = BLOCK / 2;
        while half > 0 {
            for i in 0..half {
                sums[i] += sums[i + half];
            }
            half /= 2;
        }
        sums[0]
    }
}

/// The sum of squares.
///
/// # Safety
/// The CPU has `L`; `from` is valid for `len` elements.
#[inline(always)]
pub(super) unsafe fn squares<L: Lanes, G: Read>(from: *const G::Raw, len: usize) -> f64 {
    // SAFETY: our contract.
    unsafe { sum_squares::<L>(&Plain::<G>(from), len) }
}

/// `sum += addend`; returns the sum of squares of the new `sum`.
///
/// # Safety
/// The CPU has `L`; both pointers are valid for `len` elements and do not overlap.
#[inline(always)]
pub(super) unsafe fn accumulate<L: Lanes, G: Read>(sum: *mut f32, addend: *const G::Raw, len: usize) -> f64 {
    // SAFETY: our contract.
    unsafe { sum_squares::<L>(&Added::<G> { sum, addend }, len) }
}

/// All bits combined: a pass that only reads, prefetched like [`squares`].
///
/// # Safety
/// The CPU has `L`; `from` is valid for `len` elements.
#[inline(always)]
pub(super) unsafe fn read<L: Lanes, G: Read>(from: *const G::Raw, len: usize) -> u32 {
    let whole = len - len % BLOCK;
    let mut lanes = [0.0; BLOCK];
    // SAFETY: i + LANES <= whole <= len in the first loop, i < len in the second; LANES <= BLOCK.
    unsafe {
        let mut all = L::splat_bits(0);
        for block in (0..whole).step_by(BLOCK) {
            prefetch::<L, G>(from, block + AHEAD);
            for i in (block..block + BLOCK).step_by(L::LANES) {
                all = L::xor(all, L::bits(G::load::<L>(from.add(i))));
            }
        }
        L::store(lanes.as_mut_ptr(), L::float(all));
        for i in whole..len {
            lanes[0] = f32::from_bits(lanes[0].to_bits() ^ G::load::<Scalar>(from.add(i)).to_bits());
        }
    }
    lanes.iter().fold(0, |all, lane| all ^ lane.to_bits())
}

/// Copies with conversion, by way of single precision.
///
/// # Safety
/// The CPU has `L`; both pointers are valid for `len` elements and do not overlap.
#[inline(always)]
pub(super) unsafe fn convert<L: Lanes, G: Read, W: Write>(from: *const G::Raw, to: *mut W::Raw, len: usize) {
    let whole = len - len % BLOCK;
    // SAFETY: i + LANES <= whole <= len in the first loop (LANES divides BLOCK), i < len in the second.
    unsafe {
        for i in (0..whole).step_by(L::LANES) {
            W::store::<L>(to.add(i), G::load::<L>(from.add(i)), false);
        }
        for i in whole..len {
            W::store::<Scalar>(to.add(i), G::load::<Scalar>(from.add(i)), false);
        }
    }
}
