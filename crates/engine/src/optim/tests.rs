//! Every level against an independent, naive reference, byte for byte.

#![forbid(unsafe_code)]

use super::*;
use half::{bf16, f16};
use proptest::prelude::*;
use reference::Kind::{self, Bf16, F16, F32};
use reference::{Random, State};

mod reference;

const GRADS: [Kind; 3] = [F32, Bf16, F16];
const WEIGHTS: [Kind; 4] = [Kind::None, F32, Bf16, F16];
const SIZES: [usize; 11] = [0, 1, 7, 8, 15, 16, 17, 31, 33, 257, 1000];

fn hypers() -> Vec<Hyper> {
    let mut all = Vec::new();
    for beta1 in [0.9, 0.3] {
        for (decoupled, maximize) in [(true, false), (true, true), (false, false), (false, true)] {
            let (lr, beta2, eps, weight_decay) = (1e-3, 0.999, 1e-8, 0.01);
            all.push(Hyper { lr, beta1, beta2, eps, weight_decay, decoupled, maximize });
        }
    }
    all.push(Hyper { weight_decay: 0.0, decoupled: false, ..all[0] });
    all.push(Hyper { eps: 0.0, ..all[0] });
    all
}

/// Two steps at every level and naively; the bytes must agree, outside of the range as well.
fn check(n: usize, start: usize, seed: u64, g: Kind, o: Kind, h: &Hyper) {
    let fresh = State::random(n + start, seed, g, o);
    let mut expected = fresh.clone();
    for step in 1..=2 {
        expected.naive(start..start + n, h, step, 0.125);
    }
    for level in Level::available() {
        let mut got = fresh.clone();
        for step in 1..=2 {
            got.update(level, start..start + n, &Consts::new(h, step, 0.125));
        }
        assert!(got.bits() == expected.bits(), "{level:?} n={n} start={start} {g:?} {o:?} {h:?}");
    }
}

#[test]
fn all_levels_equal_the_reference() {
    for h in hypers() {
        for (g, o) in GRADS.into_iter().flat_map(|g| WEIGHTS.map(|o| (g, o))) {
            for n in SIZES {
                for start in 0..4 {
                    check(n, start, n as u64, g, o, &h);
                }
            }
        }
    }
}

#[test]
fn large_chunks_equal_the_reference() {
    let hypers = hypers();
    for (i, (g, o)) in GRADS.into_iter().flat_map(|g| WEIGHTS.map(|o| (g, o))).enumerate() {
        check((1 << 20) + 3, i % 4, i as u64, g, o, &hypers[i % hypers.len()]);
    }
}

#[test]
fn nan_and_infinity_propagate() {
    for h in hypers() {
        for level in Level::available() {
            for (g, o) in GRADS.into_iter().flat_map(|g| WEIGHTS.map(|o| (g, o))) {
                let mut got = State::random(37, 5, g, o);
                for (i, x) in [(3, f32::NAN), (20, f32::INFINITY), (35, f32::NEG_INFINITY), (36, -f32::NAN)] {
                    got.grad[i] = x;
                    got.half[i] = if g == F16 { f16::from_f32(x).to_bits() } else { bf16::from_f32(x).to_bits() };
                }
                let mut expected = got.clone();
                expected.naive(0..37, &h, 1, 1.0);
                got.update(level, 0..37, &Consts::new(&h, 1, 1.0));
                assert_eq!(got.bits(), expected.bits(), "{level:?} {g:?} {o:?} {h:?}");
                assert!([3, 20, 35, 36].into_iter().all(|i| got.w[i].is_nan()));
                assert_eq!(got.w.iter().filter(|x| x.is_nan()).count(), 4);
            }
        }
    }
}

#[test]
fn denormal_moments_are_flushed_unless_eps_is_zero() {
    for level in Level::available() {
        for eps in [1e-8, 0.0] {
            let h = Hyper { eps, ..hypers()[0] };
            let mut s = State::random(40, 9, F32, Kind::None);
            s.grad.fill(0.0);
            s.m.fill(-f32::MIN_POSITIVE);
            s.v.fill(f32::MIN_POSITIVE);
            s.update(level, 0..40, &Consts::new(&h, 10, 1.0));
            for (m, v) in s.m.iter().zip(&s.v) {
                if eps > 0.0 {
                    assert_eq!((m.to_bits(), v.to_bits()), (0, 0)); // +0, whatever the sign was
                } else {
                    assert!(m.is_subnormal() && v.is_subnormal());
                }
            }
        }
    }
}

/// Bits that matter to rounding: random ones, and all sorts of specials.
fn awkward(n: usize) -> Vec<f32> {
    let mut r = Random(11);
    let special = [0, 1, 0x7f80_0000, 0x7f80_0001, 0x7fff_ffff, 0x7f7f_ffff, 0x3f80_8000, 0x3f81_8000, 0x0000_8000];
    let special = special.into_iter().flat_map(|x: u32| [x, x | 1 << 31]);
    special.chain(std::iter::repeat_with(|| r.bits() as u32)).take(n).map(f32::from_bits).collect()
}

#[test]
fn narrowing_matches_half() {
    let from = awkward(1 << 18 | 5);
    for level in Level::available() {
        let mut to = vec![0; from.len()];
        narrow(level, &from, Target::Bf16(&mut to));
        for (x, &y) in from.iter().zip(&to) {
            assert_eq!(y, bf16::from_f32(*x).to_bits(), "{level:?} {x:e}");
            assert_eq!(x.is_nan(), bf16::from_bits(y).is_nan());
        }
        narrow(level, &from, Target::F16(&mut to));
        for (x, &y) in from.iter().zip(&to) {
            assert_eq!(y, f16::from_f32(*x).to_bits(), "{level:?} {x:e}");
            assert_eq!(x.is_nan(), f16::from_bits(y).is_nan());
        }
        let mut copy = vec![0.0; from.len()];
        narrow(level, &from, Target::F32(&mut copy));
        assert!(from.iter().zip(&copy).all(|(a, b)| a.to_bits() == b.to_bits()));
        narrow(level, &from, Target::None);
    }
}

#[test]
fn widening_matches_half_for_all_bits() {
    let from: Vec<u16> = (0..=u16::MAX).chain(0..5).collect();
    let mut to = vec![0.0; from.len()];
    for level in Level::available() {
        widen(level, Source::Bf16(&from), &mut to);
        // Not half's: it makes signalling NaNs quiet, a plain shift does not.
        assert!(from.iter().zip(&to).all(|(&a, b)| u32::from(a) << 16 == b.to_bits()));
        widen(level, Source::F16(&from), &mut to);
        assert!(from.iter().zip(&to).all(|(&a, b)| f16::from_bits(a).to_f32().to_bits() == b.to_bits()));
    }
}

#[test]
fn accumulating_adds_in_single_precision() {
    for level in Level::available() {
        for n in SIZES {
            for g in GRADS {
                let s = State::random(n, 3, g, Kind::None);
                let (mut sum, addend) = match g {
                    Bf16 => (s.w.clone(), Source::Bf16(&s.half)),
                    F16 => (s.w.clone(), Source::F16(&s.half)),
                    _ => (s.w.clone(), Source::F32(&s.grad)),
                };
                let mut wide = vec![0.0; n];
                widen(Level::Scalar, addend, &mut wide);
                accumulate(level, &mut sum, addend);
                assert!((0..n).all(|i| sum[i].to_bits() == (s.w[i] + wide[i]).to_bits()), "{level:?} {n} {g:?}");
            }
        }
    }
}

#[test]
fn levels_are_chosen_by_name() {
    let best = *Level::available().last().expect("scalar at least");
    assert_eq!(Level::choose(None).unwrap(), best);
    assert_eq!(Level::choose(Some("")).unwrap(), best);
    for level in Level::available() {
        assert_eq!(Level::choose(Some(level.name())).unwrap(), level);
    }
    for bad in ["sse9", "AVX2", " scalar"] {
        let text = Level::choose(Some(bad)).unwrap_err().to_string();
        assert!(text.starts_with(&format!("TRAINSTREAM_CPU={bad}: ")) && text.contains("scalar"), "{text}");
    }
}

#[test]
#[should_panic(expected = "grad and master differ in length")]
fn unequal_lengths_are_refused() {
    let (mut w, mut m, mut v) = ([0.0; 4], [0.0; 4], [0.0; 4]);
    let chunk = Chunk {
        master: &mut w,
        exp_avg: &mut m,
        exp_avg_sq: &mut v,
        grad: Source::F32(&[0.0; 3]),
        weight: Target::None,
    };
    update(Level::Scalar, chunk, &Consts::new(&hypers()[0], 1, 1.0));
}

proptest! {
    #[test]
    fn splitting_changes_nothing(
        n in 0usize..600, cuts in prop::collection::vec(0usize..600, 0..5), seed: u64, g in 0usize..3, o in 0usize..4, h in 0usize..10,
    ) {
        let (h, fresh) = (hypers()[h], State::random(n, seed, GRADS[g], WEIGHTS[o]));
        let consts = Consts::new(&h, 3, 0.5);
        let mut expected = fresh.clone();
        expected.naive(0..n, &h, 3, 0.5);
        let mut cuts: Vec<_> = cuts.into_iter().map(|c| c.min(n)).chain([0, n]).collect();
        cuts.sort_unstable();
        for level in Level::available() {
            let mut got = fresh.clone();
            for pair in cuts.windows(2) {
                got.update(level, pair[0]..pair[1], &consts);
            }
            prop_assert_eq!(got.bits(), expected.bits());
        }
    }
}
