//! The loop over an update's streams, written once; each instruction set instantiates it inside a function that
//! enables its features.
//!
//! Whole blocks go through the wide registers, the rest through the scalar ones. Both do the same correctly rounded
//! operations in the same order, so it does not matter which element meets which.

use super::super::adamw::Consts;
use super::super::noise::Noise;
use super::element::{Element, Moment, Read};
use super::lanes::Lanes;
use super::random::{self, WINDOW, Words};
use super::scalar::Scalar;
use super::step::{Probe, Rule, State, Step};
use super::weights::Weights;

/// Stride of the loops, in elements: a cache line of bfloat16, two of single precision.
pub(super) const BLOCK: usize = 32;

/// How far ahead to prefetch, in bytes of a moment.
const AHEAD: usize = 1024;

/// The streams of one update, all `len` elements long and disjoint.
pub(super) struct Streams<K, M: Moment, G: Read> {
    pub(super) weights: K,
    pub(super) exp_avg: *mut M::Raw,
    pub(super) exp_avg_sq: *mut M::Raw,
    /// Null without AMSGrad.
    pub(super) max_exp_avg_sq: *mut M::Raw,
    pub(super) grad: *const G::Raw,
    pub(super) noise: Noise,
    pub(super) len: usize,
}

impl<M: Moment, G: Read> Streams<(), M, G> {
    /// The same with these weights.
    pub(super) fn with<K: Weights>(self, weights: K) -> Streams<K, M, G> {
        let Self { weights: (), exp_avg, exp_avg_sq, max_exp_avg_sq, grad, noise, len } = self;
        Streams { weights, exp_avg, exp_avg_sq, max_exp_avg_sq, grad, noise, len }
    }
}

impl<K: Weights, M: Moment, G: Read> Streams<K, M, G> {
    /// Applies the rule to the group of elements from `i`; `whole` as in [`Weights::store`].
    ///
    /// # Safety
    /// The CPU has `L`, and `i + L::LANES <= self.len`.
    #[inline(always)]
    unsafe fn apply<L: Lanes, R: Rule<L>>(&self, rule: &R, words: &Words<L>, i: usize, whole: bool) {
        // SAFETY: the elements lie inside the streams; the rest is the contract of Lanes.
        unsafe {
            let amsgrad = !self.max_exp_avg_sq.is_null();
            let word = if R::RANDOM && (K::RANDOM || M::RANDOM) { words.at(i) } else { L::splat_bits(0) };
            let old = State::<L> {
                w: self.weights.load::<L>(i),
                m: M::load::<L>(self.exp_avg.add(i)),
                v: M::load::<L>(self.exp_avg_sq.add(i)),
                max: if amsgrad { Some(M::load::<L>(self.max_exp_avg_sq.add(i))) } else { None },
            };
            let mut g = G::load::<L>(self.grad.add(i));
            if G::PAYLOAD && (K::CARRIES || M::RANDOM) {
                g = random::quiet::<L>(g);
            }
            let new = rule.apply(old, g);
            M::round::<L>(self.exp_avg.add(i), new.m, L::and(word, L::splat_bits(WINDOW)));
            M::round::<L>(self.exp_avg_sq.add(i), new.v, L::shr16(word));
            if let Some(max) = new.max {
                // To nearest: noise of its own would only ever raise a maximum.
                M::nearest::<L>(self.max_exp_avg_sq.add(i), max);
            }
            self.weights.store::<L>(i, new.w, word, whole);
        }
    }

    /// # Safety
    /// The CPU has `L`; the pointers are valid for `self.len` elements and do not overlap.
    #[inline(always)]
    unsafe fn run<L: Lanes, R: Rule<L>, T: Rule<Scalar>>(&self, rule: &R, tail: &T) {
        let whole = self.len - self.len % BLOCK;
        // SAFETY: every i + LANES <= whole <= len in the first loop (LANES divides BLOCK), i < len in the second.
        unsafe {
            let words = Words::<L>::new(self.noise);
            for block in (0..whole).step_by(BLOCK) {
                let ahead = block + AHEAD / size_of::<M::Raw>();
                self.weights.prefetch::<L>(ahead);
                prefetch::<L, M>(self.exp_avg, ahead);
                prefetch::<L, M>(self.exp_avg_sq, ahead);
                prefetch::<L, G>(self.grad, ahead);
                if !self.max_exp_avg_sq.is_null() {
                    prefetch::<L, M>(self.max_exp_avg_sq, ahead);
                }
                for i in (block..block + BLOCK).step_by(L::LANES) {
                    self.apply(rule, &words, i, true);
                }
            }
            let words = Words::<Scalar>::new(self.noise);
            for i in whole..self.len {
                self.apply(tail, &words, i, false);
            }
            if self.weights.streams() {
                L::fence();
            }
        }
    }

    /// Updates all elements.
    ///
    /// # Safety
    /// The CPU has `L`; the pointers are valid for `self.len` elements and do not overlap.
    #[inline(always)]
    pub(super) unsafe fn update<L: Lanes>(&self, consts: &Consts) {
        // SAFETY: our contract.
        unsafe { self.run::<L, _, _>(&Step::<L>::new(consts), &Step::<Scalar>::new(consts)) }
    }

    /// Moves the bytes of an update without its arithmetic.
    ///
    /// # Safety
    /// As [`Streams::update`].
    #[inline(always)]
    pub(super) unsafe fn probe<L: Lanes>(&self) {
        // SAFETY: our contract.
        unsafe { self.run::<L, _, _>(&Probe, &Probe) }
    }
}

/// Hints at the block of `stream` from element `i`, which need not exist.
///
/// # Safety
/// The CPU has `L`.
#[inline(always)]
pub(super) unsafe fn prefetch<L: Lanes, E: Element>(stream: *const E::Raw, i: usize) {
    let start = stream.wrapping_add(i).cast::<u8>();
    for line in (0..BLOCK * size_of::<E::Raw>()).step_by(64) {
        // SAFETY: a hint takes any address.
        unsafe { L::prefetch(start.wrapping_add(line)) }
    }
}
