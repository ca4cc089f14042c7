//! The `Engine` and `Transfer` classes.

#![forbid(unsafe_code)]

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use trainstream_engine::device::{Completion, ComputeStream, Faults};
use trainstream_engine::dtype::DType;
use trainstream_engine::engine::Update;
use trainstream_engine::host::Pin;
use trainstream_engine::optim::Hyper;
use trainstream_engine::stats::Work;
use trainstream_engine::store::{Array, Master, SlotSpec};
use trainstream_engine::trace::{Lane, Span};
use trainstream_engine::{Engine, Error, Options, Result};

use crate::door::{enter, wait};
use crate::errors::raise;
use crate::tensor;

/// One engine; all methods may be called from any thread and release the interpreter lock.
#[pyclass(frozen, name = "Engine", module = "trainstream._engine")]
pub(crate) struct PyEngine(Engine);

/// A gradient on its way to the host.
#[pyclass(frozen, name = "Transfer", module = "trainstream._engine")]
pub(crate) struct PyTransfer(Arc<dyn Completion>);

#[pymethods]
impl PyTransfer {
    /// Whether the copy is over.
    fn done(&self) -> bool {
        self.0.is_done()
    }
}

/// `(numel, dtype, master, moment_dtype, amsgrad, key)`.
type PySpec = (usize, String, String, String, bool, u64);
/// `(slot, weight address, weight bytes, index into hypers, factor of the gradient)`.
type PyUpdate = (usize, u64, usize, usize, f64);
/// `(lr, beta1, beta2, eps, weight_decay, decoupled, maximize)`.
type PyHyper = (f64, f64, f64, f64, f64, bool, bool);

#[pymethods]
impl PyEngine {
    #[new]
    #[pyo3(signature = (device, threads, pin, faults=None))]
    fn new(
        py: Python<'_>,
        device: String,
        threads: Option<usize>,
        pin: &str,
        faults: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let options = Options {
            device,
            threads,
            pin: parse_pin(pin).map_err(raise)?,
            faults: faults.map(parse_faults).transpose()?,
        };
        enter(py, || Engine::new(options)).map(PyEngine)
    }

    /// Reserves state for parameters; returns slot numbers.
    fn add_slots(&self, py: Python<'_>, specs: Vec<PySpec>) -> PyResult<Vec<usize>> {
        let specs = specs.into_iter().map(parse_spec).collect::<Result<Vec<_>>>().map_err(raise)?;
        enter(py, || self.0.add_slots(&specs))
    }

    /// Copies a weight into its master, and waits.
    fn load_weight(&self, py: Python<'_>, slot: usize, address: u64, bytes: usize, stream: u64) -> PyResult<()> {
        enter(py, || self.0.load_weight(slot, tensor::range(address, bytes), ComputeStream(stream)))
    }

    /// Queues a gradient's way to the host.
    fn push_gradient(
        &self,
        py: Python<'_>,
        slot: usize,
        address: u64,
        bytes: usize,
        stream: u64,
        add: bool,
    ) -> PyResult<PyTransfer> {
        let range = tensor::range(address, bytes);
        enter(py, || self.0.push_gradient(slot, range, ComputeStream(stream), add)).map(PyTransfer)
    }

    /// Sleeps until a transfer is over; raises, and stops the engine, if it failed.
    fn settle(&self, py: Python<'_>, transfer: &PyTransfer) -> PyResult<()> {
        enter(py, || self.0.settle(transfer.0.as_ref()))
    }

    /// Queues updates in this order and returns at once.
    fn update(
        &self,
        py: Python<'_>,
        updates: Vec<PyUpdate>,
        hypers: Vec<PyHyper>,
        max_norm: Option<f64>,
        stream: u64,
    ) -> PyResult<()> {
        let hypers: Vec<Hyper> = hypers.into_iter().map(parse_hyper).collect();
        let parse = |(slot, address, bytes, group, scale): PyUpdate| {
            let hyper = *hypers.get(group).ok_or_else(|| Error::Slot { slot, why: format!("no group {group}") })?;
            Ok(Update { slot, weight: tensor::range(address, bytes), hyper, scale })
        };
        let updates = updates.into_iter().map(parse).collect::<Result<Vec<_>>>().map_err(raise)?;
        enter(py, || self.0.update(&updates, max_norm, ComputeStream(stream)))
    }

    /// Makes a stream see the last update of these slots; sleeps for the worker, interruptibly.
    fn ready(&self, py: Python<'_>, slots: Vec<usize>, stream: u64) -> PyResult<()> {
        wait(py, |slice| self.0.ready(&slots, ComputeStream(stream), slice))
    }

    /// Sleeps until the worker is idle, interruptibly.
    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        wait(py, |slice| self.0.drain(slice))
    }

    /// Takes over a 16-bit weight that somebody else may have changed, and waits.
    fn merge_weight(&self, py: Python<'_>, slot: usize, address: u64, bytes: usize, stream: u64) -> PyResult<()> {
        enter(py, || self.0.merge_weight(slot, tensor::range(address, bytes), ComputeStream(stream)))
    }

    /// Copies an array of a slot to a contiguous CPU fp32 tensor.
    fn read_array(&self, py: Python<'_>, slot: usize, which: &str, address: u64, numel: usize) -> PyResult<()> {
        let array = parse_array(which).map_err(raise)?;
        enter(py, || self.0.read_array(slot, array, tensor::floats_mut(address, numel)))
    }

    /// Replaces an array of a slot by a contiguous CPU fp32 tensor.
    fn write_array(&self, py: Python<'_>, slot: usize, which: &str, address: u64, numel: usize) -> PyResult<()> {
        let array = parse_array(which).map_err(raise)?;
        enter(py, || self.0.write_array(slot, array, tensor::floats(address, numel)))
    }

    /// Copies the gradient of a slot to a contiguous CPU fp32 tensor.
    fn read_gradient(&self, py: Python<'_>, slot: usize, address: u64, numel: usize) -> PyResult<()> {
        enter(py, || self.0.read_gradient(slot, tensor::floats_mut(address, numel)))
    }

    /// Replaces the gradient of a slot by a contiguous CPU fp32 tensor.
    fn write_gradient(&self, py: Python<'_>, slot: usize, address: u64, numel: usize) -> PyResult<()> {
        enter(py, || self.0.write_gradient(slot, tensor::floats(address, numel)))
    }

    /// Updates done on a slot.
    fn step(&self, py: Python<'_>, slot: usize) -> PyResult<u64> {
        enter(py, || self.0.step(slot))
    }

    /// Sets the number of updates done on a slot.
    fn set_step(&self, py: Python<'_>, slot: usize, step: u64) -> PyResult<()> {
        enter(py, || self.0.set_step(slot, step))
    }

    /// Raises if the engine is closed, stopped by an error, or forked.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, || self.0.usable())
    }

    /// Fills memory of the host device that its owner gives up with 0xFF, if this engine is under test.
    fn retire(&self, address: u64, bytes: usize) {
        if self.0.poisons() {
            tensor::poison(address, bytes);
        }
    }

    /// Sum of the squares of a slot's gradient; drain first, to wait interruptibly.
    fn squares(&self, py: Python<'_>, slot: usize) -> PyResult<f64> {
        enter(py, || self.0.squares(slot))
    }

    /// Whether a slot has a master.
    fn has_master(&self, py: Python<'_>, slot: usize) -> PyResult<bool> {
        enter(py, || self.0.has_master(slot))
    }

    /// Updates that a norm forbade so far.
    fn skipped_steps(&self) -> u64 {
        self.0.stats().skipped_steps.load(Relaxed)
    }

    /// Bytes, seconds and counts; see `trainstream.memory_report`.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let ([master, moments, gradients, wire, staging], usage) = enter(py, || Ok((self.0.bytes(), self.0.usage())))?;
        let stats = self.0.stats();
        let seconds = PyDict::new(py);
        for work in Work::ALL {
            seconds.set_item(work.name(), stats.spent(work).as_secs_f64())?;
        }
        let report = PyDict::new(py);
        report.set_item("host_master_bytes", master)?;
        report.set_item("host_moment_bytes", moments)?;
        report.set_item("host_gradient_bytes", gradients)?;
        report.set_item("host_staging_bytes", wire + staging)?;
        report.set_item("pinned_bytes", usage.pinned)?;
        report.set_item("pageable_bytes", usage.pageable)?;
        report.set_item("pin_refusal", self.0.pin_refusal().map(|e| e.to_string()))?;
        report.set_item("threads", self.0.threads())?;
        report.set_item("cpu", self.0.level().name())?;
        report.set_item("seconds", seconds)?;
        report.set_item("bytes_out", stats.bytes_out.load(Relaxed))?;
        report.set_item("bytes_in", stats.bytes_in.load(Relaxed))?;
        report.set_item("steps", stats.steps.load(Relaxed))?;
        report.set_item("skipped_steps", stats.skipped_steps.load(Relaxed))?;
        report.set_item("grad_norm", *stats.grad_norm.lock().unwrap_or_else(PoisonError::into_inner))?;
        Ok(report)
    }

    /// Counts a step.
    fn count_step(&self) {
        self.0.count_step();
    }

    /// Starts recording spans.
    fn start_trace(&self) {
        self.0.stats().trace.start();
    }

    /// Records a span of the calling thread that began `seconds` ago.
    fn add_span(&self, name: &str, seconds: f64) {
        let now = Instant::now();
        let start = now.checked_sub(Duration::from_secs_f64(seconds.max(0.0))).unwrap_or(now);
        self.0.stats().trace.add(name, Lane::Caller, start, now);
    }

    /// All spans: `(name, lane, start, end)` in seconds.
    fn spans(&self) -> Vec<(String, &'static str, f64, f64)> {
        let row = |s: Span| (s.name, s.lane.name(), s.start.as_secs_f64(), s.end.as_secs_f64());
        self.0.stats().trace.all().into_iter().map(row).collect()
    }

    /// Finishes what is queued and stops the threads.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, || {
            self.0.close();
            Ok(())
        })
    }
}

fn parse_spec((numel, dtype, master, moments, amsgrad, key): PySpec) -> Result<SlotSpec> {
    let master = match master.as_str() {
        "float32" => Master::F32,
        "split" => Master::Split,
        "none" => Master::None,
        _ => return Err(unknown("master", &master, "float32, split or none")),
    };
    let bf16_moments = match DType::parse("moment_dtype", &moments)? {
        DType::F32 => false,
        DType::Bf16 => true,
        DType::F16 => return Err(unknown("moment_dtype", &moments, "float32 or bfloat16")),
    };
    Ok(SlotSpec { numel, weight: DType::parse("dtype", &dtype)?, master, bf16_moments, amsgrad, key })
}

fn parse_hyper((lr, beta1, beta2, eps, weight_decay, decoupled, maximize): PyHyper) -> Hyper {
    Hyper { lr, beta1, beta2, eps, weight_decay, decoupled, maximize }
}

fn parse_pin(value: &str) -> Result<Pin> {
    match value {
        "auto" => Ok(Pin::Auto),
        "True" => Ok(Pin::Always),
        "False" => Ok(Pin::Never),
        _ => Err(unknown("pin", value, "\"auto\", True or False")),
    }
}

fn parse_array(value: &str) -> Result<Array> {
    match value {
        "master" => Ok(Array::Master),
        "exp_avg" => Ok(Array::ExpAvg),
        "exp_avg_sq" => Ok(Array::ExpAvgSq),
        "max_exp_avg_sq" => Ok(Array::MaxExpAvgSq),
        _ => Err(unknown("array", value, "master, exp_avg, exp_avg_sq or max_exp_avg_sq")),
    }
}

fn unknown(option: &'static str, value: &str, allowed: &str) -> Error {
    Error::Config { option, value: value.into(), allowed: format!("expected {allowed}") }
}

fn parse_faults(dict: &Bound<'_, PyDict>) -> PyResult<Faults> {
    let mut faults = Faults::default();
    for (key, value) in dict {
        match key.extract::<String>()?.as_str() {
            "seed" => faults.seed = value.extract()?,
            "max_delay_us" => faults.max_delay_us = value.extract()?,
            "poison" => faults.poison = value.extract()?,
            "fail_copy" => faults.fail_copy = value.extract()?,
            "pin_limit" => faults.pin_limit = value.extract()?,
            "panic_job" => faults.panic_job = value.extract()?,
            other => return Err(raise(unknown("faults", other, "a field of Faults"))),
        }
    }
    Ok(faults)
}
