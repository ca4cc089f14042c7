//! The host optimizer against the memory: for every state layout, ns per parameter, GB/s, and per cent of a probe that
//! moves the same streams without arithmetic. Kernel and probe alternate within one run; ratios are medians over the
//! rounds, and the answer is checked against the scalar level. Run with
//! `cargo bench [-- --elements N --rounds N --threads N --only TEXT]`.

#![allow(clippy::print_stdout, missing_docs)]

use std::hint::black_box;
use std::time::Instant;

use trainstream_engine::host::{Arena, Pin, Region};
use trainstream_engine::optim::parallel::PIECE;
use trainstream_engine::optim::{
    Chunk, Consts, Hyper, Level, Moments, Noise, Slices, Source, Target, Weights, accumulate_all, each_piece, probe,
    read_probe, squares_all, update, update_all,
};
use trainstream_engine::threads;

const HYPER: Hyper =
    Hyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, decoupled: true, maximize: false };

/// What a command line may set.
struct Settings {
    elements: usize,
    rounds: usize,
    threads: Option<usize>,
    only: String,
}

impl Settings {
    fn parse() -> Self {
        let mut settings = Settings { elements: 32 << 20, rounds: 9, threads: None, only: String::new() };
        let mut words = std::env::args().skip(1).filter(|word| word != "--bench");
        while let Some(word) = words.next() {
            let value = words.next().unwrap_or_else(|| panic!("{word} needs a value"));
            let number = || value.parse().unwrap_or_else(|_| panic!("{word} {value}: expected a number"));
            match word.as_str() {
                "--elements" => settings.elements = number(),
                "--rounds" => settings.rounds = number(),
                "--threads" => settings.threads = Some(number()),
                "--only" => settings.only = value,
                _ => panic!("{word}: expected --elements, --rounds, --threads or --only"),
            }
        }
        settings
    }
}

/// How weights are kept, and the type of the output.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    Fp32,
    Fp32ToBf16,
    Split,
    Bare,
}

#[derive(Clone, Copy)]
struct Layout {
    name: &'static str,
    form: Form,
    bf16_moments: bool,
    bf16_grad: bool,
}

impl Layout {
    /// Bytes that an update of one parameter moves.
    fn bytes(self) -> usize {
        let weights = match self.form {
            Form::Fp32 | Form::Split => 8,
            Form::Fp32ToBf16 => 10,
            Form::Bare => 4,
        };
        weights + if self.bf16_moments { 8 } else { 16 } + if self.bf16_grad { 2 } else { 4 }
    }
}

const LAYOUTS: [Layout; 6] = [
    Layout { name: "(a) fp32", form: Form::Fp32, bf16_moments: false, bf16_grad: false },
    Layout { name: "(a) fp32, bf16 in and out", form: Form::Fp32ToBf16, bf16_moments: false, bf16_grad: true },
    Layout { name: "(b) bf16 moments, in and out", form: Form::Fp32ToBf16, bf16_moments: true, bf16_grad: true },
    Layout { name: "(c) split, fp32 moments", form: Form::Split, bf16_moments: false, bf16_grad: true },
    Layout { name: "(c) split, bf16 moments", form: Form::Split, bf16_moments: true, bf16_grad: true },
    Layout { name: "(d) all bf16", form: Form::Bare, bf16_moments: true, bf16_grad: true },
];

/// The streams of one layout, with values a training run could have.
struct State {
    layout: Layout,
    regions: [Region; 5],
}

impl State {
    /// Regions: master or high half, output or low half, exp_avg, exp_avg_sq, gradient.
    fn new(layout: Layout, n: usize, pool: &rayon::ThreadPool) -> Self {
        let (wide, half) = (4 * n, 2 * n);
        let (master, second) = match layout.form {
            Form::Fp32 => (wide, 0),
            Form::Fp32ToBf16 => (wide, half),
            Form::Split => (half, half),
            Form::Bare => (half, 0),
        };
        let moment = if layout.bf16_moments { half } else { wide };
        let sizes = [master, second, moment, moment, if layout.bf16_grad { half } else { wide }];
        let mut regions = Arena::new(None, Pin::Never).reserve(&sizes, pool).expect("memory").into_iter();
        let mut state = State { layout, regions: std::array::from_fn(|_| regions.next().expect("one per size")) };
        for (i, region) in state.regions.iter_mut().enumerate() {
            let scale = [1.0, 0.0, 1e-3, 1e-6, 1e-3][i];
            let wide = match i {
                0 => matches!(layout.form, Form::Fp32 | Form::Fp32ToBf16),
                2 | 3 => !layout.bf16_moments,
                4 => !layout.bf16_grad,
                _ => false,
            };
            fill(region, wide, scale, i != 3);
        }
        state
    }

    fn chunk(&mut self) -> Chunk<'_> {
        let [first, second, exp_avg, exp_avg_sq, grad] = &mut self.regions;
        Chunk {
            weights: match self.layout.form {
                Form::Fp32 => Weights::Master { master: first.as_mut_slice(), weight: Target::None },
                Form::Fp32ToBf16 => {
                    Weights::Master { master: first.as_mut_slice(), weight: Target::Bf16(second.as_mut_slice()) }
                }
                Form::Split => Weights::Split { high: first.as_mut_slice(), low: second.as_mut_slice() },
                Form::Bare => Weights::Bare(first.as_mut_slice()),
            },
            moments: match self.layout.bf16_moments {
                true => Moments::Bf16(slices(exp_avg, exp_avg_sq)),
                false => Moments::F32(slices(exp_avg, exp_avg_sq)),
            },
            grad: if self.layout.bf16_grad { Source::Bf16(grad.as_slice()) } else { Source::F32(grad.as_slice()) },
            noise: Noise::new(0, 1),
        }
    }

    /// The first bytes of every stream.
    fn head(&self, elements: usize) -> Vec<Vec<u8>> {
        let n = self.regions[4].bytes() / if self.layout.bf16_grad { 2 } else { 4 };
        self.regions.iter().map(|r| r.as_slice::<u8>()[..r.bytes() / n * elements].to_vec()).collect()
    }
}

fn slices<'a, T: trainstream_engine::host::Plain>(
    exp_avg: &'a mut Region,
    exp_avg_sq: &'a mut Region,
) -> Slices<'a, T> {
    Slices { exp_avg: exp_avg.as_mut_slice(), exp_avg_sq: exp_avg_sq.as_mut_slice(), max_exp_avg_sq: None }
}

/// Values of either sign within `scale`.
fn fill(region: &mut Region, wide: bool, scale: f32, signed: bool) {
    let value = |i: usize| {
        let x = (i as u32).wrapping_mul(0x9e37_79b9) >> 8;
        let x = x as f32 / (1 << 24) as f32 * scale;
        if signed && i & 1 == 1 { -x } else { x }
    };
    match wide {
        true => region.as_mut_slice::<f32>().iter_mut().enumerate().for_each(|(i, x)| *x = value(i)),
        false => region
            .as_mut_slice::<u16>()
            .iter_mut()
            .enumerate()
            .for_each(|(i, x)| *x = (value(i).to_bits() >> 16) as u16),
    }
}

fn seconds(f: impl FnOnce()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64()
}

fn median(mut x: Vec<f64>) -> f64 {
    x.sort_by(f64::total_cmp);
    x[x.len() / 2]
}

/// Medians of both arms' seconds, and of the rounds' ratios `b / a`.
fn paired(rounds: usize, mut a: impl FnMut(), mut b: impl FnMut()) -> (f64, f64, f64) {
    let times: Vec<(f64, f64)> = (0..=rounds).map(|_| (seconds(&mut a), seconds(&mut b))).skip(1).collect();
    let ratio = median(times.iter().map(|(a, b)| b / a).collect());
    (median(times.iter().map(|t| t.0).collect()), median(times.iter().map(|t| t.1).collect()), ratio)
}

fn layouts(settings: &Settings, pool: &rayon::ThreadPool, level: Level) {
    let (n, rounds, threads) = (settings.elements, settings.rounds, pool.current_num_threads());
    for layout in LAYOUTS.into_iter().filter(|l| l.name.contains(&settings.only)) {
        let (mut ours, mut other) = (State::new(layout, n, pool), State::new(layout, n, pool));
        let before = ours.head(1000);
        let consts = Consts::new(&HYPER, 10, 1.0);
        let (time, _, ratio) = paired(
            rounds,
            || update_all(pool, level, vec![(ours.chunk(), &consts)]),
            || each_piece(pool, vec![(other.chunk(), ())], |chunk, ()| probe(level, chunk)),
        );
        let mut expected = State::new(layout, 1000, pool);
        assert_eq!(expected.head(1000), before);
        (0..=rounds).for_each(|_| update(Level::Scalar, &mut expected.chunk(), &consts));
        let checked = if expected.head(1000) == ours.head(1000) { "right" } else { "WRONG" };
        let (ns, rate) = (time * 1e9 / n as f64, (layout.bytes() * n) as f64 / time / 1e9);
        println!(
            "{:<30} {:<7} {threads:>3} {:>7} {ns:>9.3} {rate:>7.1} {:>8.0} %  {checked}",
            layout.name,
            level.name(),
            layout.bytes(),
            100.0 * ratio,
        );
        assert_eq!(checked, "right", "{} differs from the scalar level", layout.name);
    }
}

fn norms(settings: &Settings, pool: &rayon::ThreadPool, level: Level) {
    let (n, rounds, threads) = (settings.elements, settings.rounds, pool.current_num_threads());
    for layout in [LAYOUTS[0], LAYOUTS[1]] {
        let name = if layout.bf16_grad { "norm of a bf16 gradient" } else { "norm of a fp32 gradient" };
        if !name.contains(&settings.only) {
            continue;
        }
        let mut state = State::new(layout, n, pool);
        let grad = state.chunk().grad;
        let mut sum = 0.0;
        let (time, _, ratio) = paired(
            rounds,
            || sum = squares_all(pool, level, grad),
            || each_source(pool, grad, |piece| read_probe(level, piece)),
        );
        let exact = squares_all(pool, Level::Scalar, grad);
        let bytes = if layout.bf16_grad { 2 } else { 4 };
        let rate = (bytes * n) as f64 / time / 1e9;
        let checked = if sum.to_bits() == exact.to_bits() { "right" } else { "WRONG" };
        println!(
            "{name:<30} {:<7} {threads:>3} {bytes:>7} {:>9.3} {rate:>7.1} {:>8.0} %  {checked}",
            level.name(),
            time * 1e9 / n as f64,
            100.0 * ratio,
        );
        assert_eq!(checked, "right", "{name} differs from the scalar level");
    }
}

fn each_source(pool: &rayon::ThreadPool, from: Source<'_>, each: impl Fn(Source<'_>) -> u32 + Sync) {
    use rayon::prelude::*;
    let n = from.len();
    let bits = pool.install(|| {
        let pieces = (0..n.div_ceil(PIECE)).into_par_iter().with_max_len(1);
        let piece = |i: usize| from.split_at((i * PIECE + PIECE).min(n)).0.split_at(i * PIECE).1;
        pieces.map(|i| each(piece(i))).reduce(|| 0, |a, b| a ^ b)
    });
    black_box(bits);
}

/// Changes a state of fp32 arrays.
type Spoil = fn(&mut State);

fn scale_gradient(state: &mut State, by: f32) {
    state.regions[4].as_mut_slice::<f32>().iter_mut().for_each(|x| *x *= by);
}

fn forget(state: &mut State) {
    state.regions[2].as_mut_slice::<f32>().fill(0.0);
    state.regions[3].as_mut_slice::<f32>().fill(0.0);
}

/// Times of awkward inputs relative to the usual one.
fn awkward(settings: &Settings, pool: &rayon::ThreadPool, level: Level) {
    let (n, rounds, threads) = (settings.elements / 2, settings.rounds, pool.current_num_threads());
    let cases: [(&str, Spoil); 5] = [
        ("20 % moments stuck at denormals", |s| {
            s.regions[2].as_mut_slice::<f32>().iter_mut().step_by(5).for_each(|x| *x = 1e-40);
            s.regions[3].as_mut_slice::<f32>().iter_mut().step_by(5).for_each(|x| *x = 1e-40);
            s.regions[4].as_mut_slice::<f32>().iter_mut().step_by(5).for_each(|x| *x = 0.0);
        }),
        ("all gradients zero", |s| scale_gradient(s, 0.0)),
        ("gradients of 1e-20", |s| scale_gradient(s, 1e-17)),
        ("gradients of 1e-20, no state", |s| {
            scale_gradient(s, 1e-17);
            forget(s);
        }),
        ("gradients denormal, no state", |s| {
            scale_gradient(s, 1e-37);
            forget(s);
        }),
    ];
    for (name, spoil) in cases.into_iter().filter(|(name, _)| name.contains(&settings.only)) {
        let (mut usual, mut spoiled) = (State::new(LAYOUTS[0], n, pool), State::new(LAYOUTS[0], n, pool));
        spoil(&mut spoiled);
        let consts = Consts::new(&HYPER, 10, 1.0);
        let (_, time, ratio) = paired(
            rounds,
            || update_all(pool, level, vec![(usual.chunk(), &consts)]),
            || update_all(pool, level, vec![(spoiled.chunk(), &consts)]),
        );
        println!(
            "{name:<30} {:<7} {threads:>3} {:>7} {:>9.3} {:>7} {ratio:>7.2} x",
            level.name(),
            "",
            time * 1e9 / n as f64,
            "",
        );
    }
}

/// 10,000 tensors of 64 elements against one of as many, and accumulation.
fn others(settings: &Settings, pool: &rayon::ThreadPool, level: Level) {
    let (rounds, threads) = (settings.rounds, pool.current_num_threads());
    let consts = Consts::new(&HYPER, 10, 1.0);
    if "10,000 tensors of 64".contains(&settings.only) {
        let (count, each) = (10_000, 64);
        let (mut one, mut many) =
            (State::new(LAYOUTS[0], count * each, pool), State::new(LAYOUTS[0], count * each, pool));
        let (_, time, ratio) = paired(
            10 * rounds,
            || update_all(pool, level, vec![(one.chunk(), &consts)]),
            || {
                let [master, _, exp_avg, exp_avg_sq, grad] = &mut many.regions;
                let streams = [master, exp_avg, exp_avg_sq].map(|region| region.as_mut_slice().chunks_mut(each));
                let [master, exp_avg, exp_avg_sq] = streams;
                let work = master.zip(exp_avg).zip(exp_avg_sq).zip(grad.as_slice().chunks(each));
                let chunk = |(((master, exp_avg), exp_avg_sq), grad)| Chunk {
                    weights: Weights::Master { master, weight: Target::None },
                    moments: Moments::F32(Slices { exp_avg, exp_avg_sq, max_exp_avg_sq: None }),
                    grad: Source::F32(grad),
                    noise: Noise::new(0, 1),
                };
                let work = work.map(|streams| (chunk(streams), &consts)).collect();
                update_all(pool, level, work);
            },
        );
        println!(
            "{:<30} {:<7} {threads:>3} {:>7} {:>9.3} {:>7} {ratio:>7.2} x",
            "10,000 tensors of 64",
            level.name(),
            "",
            time * 1e9 / (count * each) as f64,
            "",
        );
    }
    if "accumulate a bf16 gradient".contains(&settings.only) {
        let n = settings.elements;
        let mut state = State::new(LAYOUTS[1], n, pool);
        let [sum, _, _, _, grad] = &mut state.regions;
        let (grad, mut sum_of) = (Source::Bf16(grad.as_slice()), 0.0);
        let times = (0..=rounds).map(|_| seconds(|| sum_of += accumulate_all(pool, level, sum.as_mut_slice(), grad)));
        let time = median(times.skip(1).collect());
        black_box(sum_of);
        println!(
            "{:<30} {:<7} {threads:>3} {:>7} {:>9.3} {:>7.1}",
            "accumulate a bf16 gradient",
            level.name(),
            10,
            time * 1e9 / n as f64,
            (10 * n) as f64 / time / 1e9,
        );
    }
}

fn main() {
    let settings = Settings::parse();
    let available = threads::count(settings.threads).expect("threads");
    println!(
        "{} elements, {} rounds, medians; probe = the same streams without arithmetic",
        settings.elements, settings.rounds
    );
    println!(
        "{:<30} {:<7} {:>3} {:>7} {:>9} {:>7} {:>10}",
        "", "level", "thr", "B/param", "ns/param", "GB/s", "of probe"
    );
    for level in Level::available().into_iter().rev().filter(|&l| l != Level::Scalar) {
        for threads in if available > 1 { vec![1, available] } else { vec![1] } {
            let pool = threads::pool(threads).expect("threads");
            layouts(&settings, &pool, level);
            norms(&settings, &pool, level);
            awkward(&settings, &pool, level);
            others(&settings, &pool, level);
        }
    }
}
