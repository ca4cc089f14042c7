//! Random states and the naive step that the kernels are measured by.

#![forbid(unsafe_code)]

use super::super::*;
use Kind::{Bf16, F16, F32};
use half::{bf16, f16};

/// Element types; `None` only as a target.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kind {
    None,
    F32,
    Bf16,
    F16,
}
/// SplitMix64.
pub(super) struct Random(pub(super) u64);
impl Random {
    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// Within ±1, over many magnitudes.
    pub(super) fn float(&mut self) -> f32 {
        let bits = self.bits();
        let x = (bits >> 40) as f32 / (1 << 24) as f32;
        let x = x * 10f32.powi(-((bits & 7) as i32));
        if bits & 8 == 0 { x } else { -x }
    }
}

/// All streams of an update; 16-bit forms are rounded from `grad`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct State {
    pub(super) w: Vec<f32>,
    pub(super) m: Vec<f32>,
    pub(super) v: Vec<f32>,
    pub(super) grad: Vec<f32>,
    pub(super) half: Vec<u16>,
    pub(super) out: Vec<u16>,
    pub(super) out_f32: Vec<f32>,
    pub(super) g: Kind,
    pub(super) o: Kind,
}

impl State {
    pub(super) fn random(n: usize, seed: u64, g: Kind, o: Kind) -> Self {
        let mut r = Random(seed);
        let mut floats = |scale: f32| (0..n).map(|_| r.float() * scale).collect::<Vec<_>>();
        let (w, m, grad) = (floats(1.0), floats(0.1), floats(0.1));
        let v = floats(0.1).into_iter().map(|x| x * x).collect();
        let half =
            grad.iter().map(|&x| if g == F16 { f16::from_f32(x).to_bits() } else { bf16::from_f32(x).to_bits() });
        Self { half: half.collect(), w, m, v, grad, out: vec![7; n], out_f32: vec![7.0; n], g, o }
    }

    /// Runs the kernel over `range`.
    pub(super) fn update(&mut self, level: Level, range: std::ops::Range<usize>, c: &Consts) {
        let r = range;
        let grad = match self.g {
            Bf16 => Source::Bf16(&self.half[r.clone()]),
            F16 => Source::F16(&self.half[r.clone()]),
            _ => Source::F32(&self.grad[r.clone()]),
        };
        let weight = match self.o {
            Kind::None => Target::None,
            F32 => Target::F32(&mut self.out_f32[r.clone()]),
            Bf16 => Target::Bf16(&mut self.out[r.clone()]),
            F16 => Target::F16(&mut self.out[r.clone()]),
        };
        let (master, exp_avg) = (&mut self.w[r.clone()], &mut self.m[r.clone()]);
        update(level, Chunk { master, exp_avg, exp_avg_sq: &mut self.v[r], grad, weight }, c);
    }

    /// The step as the textbook writes it, with nothing shared with the kernels.
    pub(super) fn naive(&mut self, range: std::ops::Range<usize>, h: &Hyper, step: i32, scale: f64) {
        let (bc1, bc2) = (1.0 - h.beta1.powf(f64::from(step)), 1.0 - h.beta2.powf(f64::from(step)));
        let small = |x: f32| if h.eps > 0.0 && x.abs() < f32::MIN_POSITIVE { 0.0 } else { x };
        for i in range {
            let mut w = self.w[i];
            let mut g = match self.g {
                Bf16 => bf16::from_bits(self.half[i]).to_f32(),
                F16 => f16::from_bits(self.half[i]).to_f32(),
                _ => self.grad[i],
            } * scale as f32;
            if h.maximize {
                g = -g;
            }
            if h.decoupled {
                w *= (1.0 - h.lr * h.weight_decay) as f32;
            } else {
                g = w.mul_add(h.weight_decay as f32, g);
            }
            let c = 1.0 - h.beta1;
            let m = self.m[i];
            let m = if (c as f32) < 0.5 { (c as f32).mul_add(g - m, m) } else { (c as f32 - 1.0).mul_add(g - m, g) };
            let v = ((1.0 - h.beta2) as f32 * g).mul_add(g, h.beta2 as f32 * self.v[i]);
            let (m, v) = (small(m), small(v));
            let denom = v.sqrt() / bc2.sqrt() as f32 + h.eps as f32;
            w += (-(h.lr / bc1) as f32 * m) / denom;
            (self.w[i], self.m[i], self.v[i]) = (w, m, v);
            match self.o {
                Kind::None => {}
                F32 => self.out_f32[i] = w,
                Bf16 => self.out[i] = bf16::from_f32(w).to_bits(),
                F16 => self.out[i] = f16::from_f32(w).to_bits(),
            }
        }
    }

    /// Every written byte; NaN payloads made equal.
    pub(super) fn bits(&self) -> Vec<u32> {
        let all = [&self.w, &self.m, &self.v, &self.out_f32].into_iter().flatten();
        let floats = all.map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() });
        let nan = |x: u16| match self.o {
            Bf16 => bf16::from_bits(x).is_nan(),
            _ => f16::from_bits(x).is_nan(),
        };
        floats.chain(self.out.iter().map(|&x| if nan(x) { u32::MAX } else { x.into() })).collect()
    }
}
