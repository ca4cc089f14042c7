//! Random states in every layout, and the naive step that the kernels are measured by.

#![forbid(unsafe_code)]

use std::ops::Range;

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

/// Where weights are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Form {
    /// fp32 master, rounded to this kind.
    Master(Kind),
    Split,
    Bare,
}

/// A state layout and the gradients that come to it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Layout {
    pub(super) form: Form,
    pub(super) bf16_moments: bool,
    pub(super) amsgrad: bool,
    pub(super) grad: Kind,
}

impl Layout {
    /// fp32 state, fp32 gradients, no output.
    pub(super) const PLAIN: Layout =
        Layout { form: Form::Master(Kind::None), bf16_moments: false, amsgrad: false, grad: F32 };

    pub(super) fn all() -> Vec<Layout> {
        let mut all = Vec::new();
        let masters = [Kind::None, F32, Bf16, F16].map(Form::Master);
        for form in masters.into_iter().chain([Form::Split, Form::Bare]) {
            for (bf16_moments, amsgrad) in [(false, false), (false, true), (true, false), (true, true)] {
                all.extend([F32, Bf16, F16].map(|grad| Layout { form, bf16_moments, amsgrad, grad }));
            }
        }
        all
    }
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

/// fp32 values, and bits of 16-bit ones; a layout uses one or the other.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Both {
    pub(super) wide: Vec<f32>,
    pub(super) half: Vec<u16>,
}

impl Both {
    fn new(wide: Vec<f32>, to_half: impl Fn(f32) -> u16) -> Self {
        Both { half: wide.iter().map(|&x| to_half(x)).collect(), wide }
    }
    pub(super) fn get(&self, bf16: bool, i: usize) -> f32 {
        if bf16 { bf16::from_bits(self.half[i]).to_f32() } else { self.wide[i] }
    }
    fn set(&mut self, bf16: bool, i: usize, x: f32, window: u32) {
        if bf16 { self.half[i] = stochastic(x, window) } else { self.wide[i] = x }
    }
}

/// All streams of an update.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct State {
    pub(super) layout: Layout,
    /// fp32 master; bfloat16 weights of the bare form.
    pub(super) w: Both,
    pub(super) m: Both,
    pub(super) v: Both,
    pub(super) max: Both,
    pub(super) grad: Both,
    pub(super) out: Both,
    pub(super) high: Vec<u16>,
    pub(super) low: Vec<u16>,
}

impl State {
    pub(super) fn random(n: usize, seed: u64, layout: Layout) -> Self {
        let mut r = Random(seed);
        let mut floats = |scale: f32| (0..n).map(|_| r.float() * scale).collect::<Vec<_>>();
        let bits = |x| bf16::from_f32(x).to_bits();
        let grad_bits = |x| if layout.grad == F16 { f16::from_f32(x).to_bits() } else { bits(x) };
        let (w, m, grad) = (floats(1.0), Both::new(floats(0.1), bits), Both::new(floats(0.1), grad_bits));
        let mut squares = || Both::new(floats(0.1).into_iter().map(|x| x * x).collect(), bits);
        let (v, max) = (squares(), squares());
        let (mut high, mut low) = (vec![0; n], vec![0; n]);
        split(&w, &mut high, &mut low);
        Self { layout, w: Both::new(w, bits), m, v, max, grad, out: Both::new(vec![7.0; n], bits), high, low }
    }

    /// Runs the kernel over `range`, with the noise of parameter 3 in this step.
    pub(super) fn update(&mut self, level: Level, range: Range<usize>, step: u64, c: &Consts) {
        update(level, &mut self.chunk(range, step), c);
    }

    pub(super) fn chunk(&mut self, r: Range<usize>, step: u64) -> Chunk<'_> {
        let Layout { form, bf16_moments, amsgrad, grad } = self.layout;
        let (wide, half) = (&mut self.out.wide[r.clone()], &mut self.out.half[r.clone()]);
        let weights = match form {
            Form::Master(kind) => Weights::Master {
                master: &mut self.w.wide[r.clone()],
                weight: match kind {
                    Kind::None => Target::None,
                    F32 => Target::F32(wide),
                    Bf16 => Target::Bf16(half),
                    F16 => Target::F16(half),
                },
            },
            Form::Split => Weights::Split { high: &mut self.high[r.clone()], low: &mut self.low[r.clone()] },
            Form::Bare => Weights::Bare(&mut self.w.half[r.clone()]),
        };
        let moments = if bf16_moments {
            Moments::Bf16(Slices {
                exp_avg: &mut self.m.half[r.clone()],
                exp_avg_sq: &mut self.v.half[r.clone()],
                max_exp_avg_sq: amsgrad.then_some(&mut self.max.half[r.clone()]),
            })
        } else {
            Moments::F32(Slices {
                exp_avg: &mut self.m.wide[r.clone()],
                exp_avg_sq: &mut self.v.wide[r.clone()],
                max_exp_avg_sq: amsgrad.then_some(&mut self.max.wide[r.clone()]),
            })
        };
        let noise = Noise::new(3, step).skip(r.start);
        let grad = match grad {
            Bf16 => Source::Bf16(&self.grad.half[r]),
            F16 => Source::F16(&self.grad.half[r]),
            _ => Source::F32(&self.grad.wide[r]),
        };
        Chunk { weights, moments, grad, noise }
    }

    /// The step as the textbook writes it; only the words of the noise are shared with the kernels.
    pub(super) fn naive(&mut self, range: Range<usize>, h: &Hyper, step: u64, scale: f64) {
        let Layout { form, bf16_moments, amsgrad, grad } = self.layout;
        let (bc1, bc2) = (1.0 - h.beta1.powf(step as f64), 1.0 - h.beta2.powf(step as f64));
        let small = |x: f32| if h.eps > 0.0 && x.abs() < f32::MIN_POSITIVE { 0.0 } else { x };
        for i in range {
            let word = Noise::new(3, step).skip(i).word();
            let mut w = match form {
                Form::Master(_) => self.w.wide[i],
                Form::Split => f32::from_bits((u32::from(self.high[i]) << 16).wrapping_add(self.low[i] as i16 as u32)),
                Form::Bare => bf16::from_bits(self.w.half[i]).to_f32(),
            };
            let mut g =
                if grad == F16 { f16::from_bits(self.grad.half[i]).to_f32() } else { self.grad.get(grad == Bf16, i) };
            if g.abs() < adamw::smallest(h, scale) as f32 {
                g = 0.0;
            }
            g *= scale as f32;
            if h.maximize {
                g = -g;
            }
            if h.decoupled {
                w *= (1.0 - h.lr * h.weight_decay) as f32;
            } else {
                g = w.mul_add(h.weight_decay as f32, g);
            }
            let c = 1.0 - h.beta1;
            let m = self.m.get(bf16_moments, i);
            let m = if (c as f32) < 0.5 { (c as f32).mul_add(g - m, m) } else { (c as f32 - 1.0).mul_add(g - m, g) };
            let v = ((1.0 - h.beta2) as f32 * g).mul_add(g, h.beta2 as f32 * self.v.get(bf16_moments, i));
            let (m, v) = (small(m), small(v));
            let mut largest = v;
            if amsgrad {
                let max = self.max.get(bf16_moments, i);
                largest = if max > v { max } else { v };
                self.max.wide[i] = largest;
                self.max.half[i] = bf16::from_f32(largest).to_bits();
            }
            let denom = largest.sqrt().mul_add((1.0 / bc2.sqrt()) as f32, h.eps as f32);
            w = (m / denom).mul_add(-(h.lr / bc1) as f32, w);
            self.m.set(bf16_moments, i, m, word & 0xffff);
            self.v.set(bf16_moments, i, v, word >> 16);
            match form {
                Form::Bare => self.w.half[i] = stochastic(w, word >> 8 & 0xffff),
                Form::Split => split(&[w], &mut self.high[i..=i], &mut self.low[i..=i]),
                Form::Master(kind) => {
                    self.w.wide[i] = w;
                    match kind {
                        Kind::None => {}
                        F32 => self.out.wide[i] = w,
                        Bf16 => self.out.half[i] = bf16::from_f32(w).to_bits(),
                        F16 => self.out.half[i] = f16::from_f32(w).to_bits(),
                    }
                }
            }
        }
    }

    /// Every byte that the layout writes; NaN payloads made equal.
    pub(super) fn bits(&self) -> Vec<u32> {
        let Layout { form, bf16_moments, amsgrad, .. } = self.layout;
        let wide =
            |x: &Both| x.wide.iter().map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }).collect::<Vec<_>>();
        let half = |x: &[u16], f16_: bool| {
            let nan = |x: u16| if f16_ { f16::from_bits(x).is_nan() } else { bf16::from_bits(x).is_nan() };
            x.iter().map(|&x| if nan(x) { u32::MAX } else { x.into() }).collect::<Vec<_>>()
        };
        let moment = |x: &Both| if bf16_moments { half(&x.half, false) } else { wide(x) };
        let mut all = match form {
            Form::Master(kind) => {
                [wide(&self.w), if kind == F32 { wide(&self.out) } else { half(&self.out.half, kind == F16) }].concat()
            }
            Form::Split => self.weights().iter().map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }).collect(),
            Form::Bare => half(&self.w.half, false),
        };
        all.extend([moment(&self.m), moment(&self.v)].concat());
        if amsgrad {
            all.extend(moment(&self.max));
        }
        all
    }

    /// The weights as fp32.
    pub(super) fn weights(&self) -> Vec<f32> {
        match self.layout.form {
            Form::Master(_) => self.w.wide.clone(),
            Form::Bare => self.w.half.iter().map(|&x| bf16::from_bits(x).to_f32()).collect(),
            Form::Split => {
                let mut out = vec![0.0; self.high.len()];
                join(&self.high, &self.low, &mut out);
                out
            }
        }
    }
}

/// One of the two neighbours in bfloat16: the further from zero if `window` of 2^16 reaches up to it.
fn stochastic(x: f32, window: u32) -> u16 {
    let (upper, below) = ((x.to_bits() >> 16) as u16, x.to_bits() & 0xffff);
    match x.is_nan() {
        true => upper | 0x40,
        false => upper + u16::from(below + window >= 1 << 16),
    }
}
