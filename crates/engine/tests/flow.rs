//! The whole engine on the host device: order under random delays, poison, and injected failures.

use std::time::Duration;

use trainstream_engine::device::{ComputeStream, DeviceRange, Faults};
use trainstream_engine::engine::Update;
use trainstream_engine::flow::Waited;
use trainstream_engine::host::Pin;
use trainstream_engine::optim::{
    Chunk, Consts, Hyper, Level, Moments, Noise, Slices, Source, Target, Weights, squares_all, update,
};
use trainstream_engine::store::{Array, Master, SlotSpec};
use trainstream_engine::{Engine, Error, Options, Result, dtype::DType, threads};

const STREAM: ComputeStream = ComputeStream(0);
const HYPER: Hyper =
    Hyper { lr: 1e-2, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, decoupled: true, maximize: false };
const SIZES: [usize; 4] = [1, 1000, 300_007, 64];

fn engine(faults: Faults, pin: Pin) -> Result<Engine> {
    Engine::new(Options { device: "cpu".into(), threads: Some(2), pin, faults: Some(faults) })
}

fn spec(numel: usize, weight: DType) -> SlotSpec {
    SlotSpec { numel, weight, master: Master::F32, bf16_moments: false, amsgrad: false, key: 0 }
}

fn range(memory: &[f32]) -> DeviceRange {
    // SAFETY: every test keeps its memory until the engine has answered for all copies.
    unsafe { DeviceRange::new(memory.as_ptr() as u64, size_of_val(memory)) }
}

fn values(n: usize, salt: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 31 + salt * 17) % 101) as f32 / 101.0 - 0.5).collect()
}

fn wait(mut ask: impl FnMut() -> Result<Waited>) -> Result<()> {
    while ask()? == Waited::Pending {}
    Ok(())
}

/// Five steps of two gradients each; the memory of each gradient is overwritten as soon as it has left.
fn train(faults: Faults, max_norm: Option<f64>) -> Result<Vec<Vec<f32>>> {
    // Declared first, dropped last: the engine may write to them until it is gone.
    let weights: Vec<_> = SIZES.iter().map(|&n| values(n, 1)).collect();
    let engine = engine(faults, Pin::Auto)?;
    let specs: Vec<_> = SIZES.iter().map(|&numel| spec(numel, DType::F32)).collect();
    let slots = engine.add_slots(&specs)?;
    for (&slot, w) in slots.iter().zip(&weights) {
        engine.load_weight(slot, range(w), STREAM)?;
    }
    for step in 0..5 {
        for add in [false, true] {
            for (&slot, w) in slots.iter().zip(&weights) {
                let mut gradient = values(w.len(), step * 7 + usize::from(add) + 3);
                engine.push_gradient(slot, range(&gradient), STREAM, add)?.wait()?;
                gradient.fill(f32::NAN);
            }
        }
        let updates: Vec<_> = slots
            .iter()
            .zip(&weights)
            .map(|(&slot, w)| Update { slot, weight: range(w), hyper: HYPER, scale: 1.0 })
            .collect();
        engine.update(&updates, max_norm, STREAM)?;
        wait(|| engine.ready(&slots, STREAM, Duration::from_millis(10)))?;
    }
    engine.close();
    Ok(weights)
}

#[test]
fn updates_equal_the_arithmetic_applied_directly() {
    for max_norm in [None, Some(0.5), Some(1e9)] {
        assert_eq!(train(Faults::default(), max_norm).unwrap(), expected(max_norm), "{max_norm:?}");
    }
}

fn expected(max_norm: Option<f64>) -> Vec<Vec<f32>> {
    let pool = threads::pool(1).unwrap();
    let mut states: Vec<_> = SIZES.iter().map(|&n| (values(n, 1), vec![0.0; n], vec![0.0; n])).collect();
    for step in 0..5 {
        let add = |n| values(n, step * 7 + 3).iter().zip(values(n, step * 7 + 4)).map(|(a, b)| a + b).collect();
        let grads: Vec<Vec<f32>> = SIZES.iter().map(|&n| add(n)).collect();
        let squares: f64 = grads.iter().map(|g| squares_all(&pool, Level::Scalar, Source::F32(g))).sum();
        let scale = max_norm.map_or(1.0, |max_norm| (max_norm / (squares.sqrt() + 1e-6)).min(1.0));
        let consts = Consts::new(&HYPER, step as u64 + 1, scale);
        for ((w, m, v), grad) in states.iter_mut().zip(&grads) {
            let mut chunk = Chunk {
                weights: Weights::Master { master: w, weight: Target::None },
                moments: Moments::F32(Slices { exp_avg: m, exp_avg_sq: v, max_exp_avg_sq: None }),
                grad: Source::F32(grad),
                noise: Noise::new(0, 0),
            };
            update(Level::Scalar, &mut chunk, &consts);
        }
    }
    states.into_iter().map(|(w, ..)| w).collect()
}

#[test]
fn random_delays_and_poison_change_nothing() {
    let calm = [None, Some(0.5)].map(|max_norm| (max_norm, train(Faults::default(), max_norm).unwrap()));
    for seed in 0..50 {
        let (max_norm, calm) = &calm[seed as usize % 2];
        let faults = Faults { seed, max_delay_us: 300, poison: true, ..Faults::default() };
        assert_eq!(&train(faults, *max_norm).unwrap(), calm, "seed {seed}");
    }
}

#[test]
fn a_failed_copy_is_told_at_the_latest_by_the_next_wait() {
    let loads = SIZES.len() as u64;
    for n in [0, loads - 1, loads, loads + 5, loads + 8, loads + 9, loads + 11] {
        let error = train(Faults { fail_copy: Some(n), ..Faults::default() }, None).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("injected failure"), "copy {n}: {text}");
    }
}

#[test]
fn a_panic_in_the_worker_stops_the_engine_and_keeps_its_state() {
    let weight = values(3, 1);
    let engine = engine(Faults { panic_job: Some(0), ..Faults::default() }, Pin::Auto).unwrap();
    let slot = engine.add_slots(&[spec(3, DType::F32)]).unwrap()[0];
    engine.load_weight(slot, range(&weight), STREAM).unwrap();
    engine.update(&[Update { slot, weight: range(&weight), hyper: HYPER, scale: 1.0 }], None, STREAM).unwrap();
    let error = wait(|| engine.drain(Duration::from_millis(10))).unwrap_err();
    assert!(
        matches!(&error, Error::Stopped { job: "update", source } if matches!(**source, Error::Panic(_))),
        "{error}"
    );
    assert!(engine.update(&[], None, STREAM).is_err(), "stopped for good");
    let mut master = vec![0.0; 3];
    engine.read_array(slot, Array::Master, &mut master).unwrap();
    assert_eq!(master, weight);
    engine.close();
}

#[test]
fn a_refused_pin_is_an_error_only_if_the_user_insists() {
    let limit = || Faults { pin_limit: Some(4096), ..Faults::default() };
    let specs = [spec(10_000, DType::F32)];
    assert!(matches!(engine(limit(), Pin::Always).unwrap().add_slots(&specs), Err(Error::Pin { .. })));
    let falls_back = engine(limit(), Pin::Auto).unwrap();
    falls_back.add_slots(&specs).unwrap();
    assert!(falls_back.pin_refusal().is_some());
    assert_eq!(falls_back.usage().pinned, 0);
}

#[test]
fn closed_engines_and_wrong_sizes_are_refused() {
    let engine = engine(Faults::default(), Pin::Never).unwrap();
    let slot = engine.add_slots(&[spec(4, DType::F32)]).unwrap()[0];
    let short = values(3, 0);
    assert!(matches!(engine.load_weight(slot, range(&short), STREAM), Err(Error::Slot { .. })));
    assert!(matches!(engine.load_weight(slot + 1, range(&short), STREAM), Err(Error::Slot { .. })));
    engine.close();
    assert!(matches!(engine.update(&[], None, STREAM), Err(Error::Closed)));
}

#[test]
fn a_missing_gpu_is_an_explanation() {
    for device in ["cuda:9999", "tpu", "cuda:x"] {
        let error = trainstream_engine::device::open(device, None).unwrap_err();
        assert!(matches!(error, Error::NoDevice { .. }), "{error}");
    }
}
