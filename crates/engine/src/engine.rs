//! The façade: slots in, gradients in, updates out. Every call checks first whether the engine may still
//! be used (not closed, not stopped by an error, not inherited through `fork`).

#![forbid(unsafe_code)]

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use crate::device::{self, Completion, ComputeStream, DeviceRange, Faults};
use crate::error::{Error, Result};
use crate::flow::{Clip, Entry, Job, Part, Queue, Shared, Waited};
use crate::host::{Arena, Pin, Pinner, Usage};
use crate::optim::{Hyper, Level};
use crate::stats::{Stats, Work};
use crate::store::{Array, Master, Slot, SlotSpec};
use crate::threads;
use crate::trace::Lane;

/// Consecutive parameters are updated together until their weights have this many bytes: large enough for
/// all threads, small enough that the next forward need not wait for much it does not use.
const BUCKET_BYTES: usize = 16 << 20;
/// Gradients that may wait in staging to be added; the caller sleeps beyond that.
const STAGING_BYTES: usize = 256 << 20;

/// How to build an [`Engine`].
#[derive(Debug)]
pub struct Options {
    /// `cpu` (the host device) or `cuda:N`.
    pub device: String,
    /// Update threads; see [`threads::count`].
    pub threads: Option<usize>,
    /// Whether host memory is page-locked.
    pub pin: Pin,
    /// Faults of the host device, for tests.
    pub faults: Option<Faults>,
}

/// One parameter to update.
#[derive(Debug, Clone, Copy)]
pub struct Update {
    /// Its slot.
    pub slot: usize,
    /// Its weight on the device.
    pub weight: DeviceRange,
    /// Hyper-parameters of its group.
    pub hyper: Hyper,
    /// Factor of its gradient.
    pub scale: f64,
}

/// The engine of one wrapped model.
#[derive(Debug)]
pub struct Engine {
    process: u32,
    threads: usize,
    entries: RwLock<Vec<Arc<Entry>>>,
    staged: Mutex<usize>,
    /// Whether norms were wanted in the last step: then they are taken as gradients arrive.
    measuring: AtomicBool,
    /// Whether norms were asked for since the last update.
    asked: AtomicBool,
    // Leaked in a forked child, where their threads do not exist.
    parts: Option<(Queue, Arc<Shared>)>,
}

impl Engine {
    /// Opens the device and starts the threads.
    pub fn new(options: Options) -> Result<Self> {
        let threads = threads::count(options.threads)?;
        let level = Level::detect()?;
        let device = device::open(&options.device, options.faults)?;
        // The host device pins only to be tested: its memory is RAM either way.
        let pinner: Arc<dyn Pinner> = device.clone();
        let shared = Arc::new(Shared {
            arena: Arena::new(Some(pinner), options.pin),
            device,
            pool: threads::pool(threads)?,
            level,
            stats: Stats::default(),
            staging: Mutex::default(),
        });
        let queue = Queue::start(Arc::clone(&shared))?;
        Ok(Engine {
            process: std::process::id(),
            threads,
            entries: RwLock::default(),
            staged: Mutex::new(0),
            measuring: AtomicBool::new(false),
            asked: AtomicBool::new(false),
            parts: Some((queue, shared)),
        })
    }

    /// Reserves host state for parameters; returns their slot numbers. All or nothing.
    pub fn add_slots(&self, specs: &[SlotSpec]) -> Result<Vec<usize>> {
        self.usable()?;
        let sizes: Vec<usize> = specs.iter().flat_map(|&s| Slot::sizes(s)).collect();
        let mut regions = self.shared().arena.reserve(&sizes, &self.shared().pool)?.into_iter();
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        let first = entries.len();
        entries.extend((first..).zip(specs).map(|(i, &spec)| Arc::new(Entry::new(i, Slot::new(spec, &mut regions)))));
        Ok((first..entries.len()).collect())
    }

    /// Copies a weight from the device into its master, and waits.
    pub fn load_weight(&self, slot: usize, weight: DeviceRange, stream: ComputeStream) -> Result<()> {
        self.usable()?;
        let entry = self.at_rest(slot)?;
        let shared = self.shared();
        let fence = shared.device.fence(stream)?;
        let mut slot = self.matching(slot, &entry, weight)?;
        Stats::add(&shared.stats.bytes_out, weight.bytes());
        slot.upload().send(|region| shared.device.copy_out(weight, region, &fence))?;
        slot.adopt_upload(shared.level)?;
        slot.upload().region().map(|_| ())
    }

    /// Queues a gradient's way to the host: as a new one, or (`add`) to be added to the one that is there.
    /// The device memory must stay as it is until the completion is done.
    pub fn push_gradient(
        &self,
        slot: usize,
        gradient: DeviceRange,
        stream: ComputeStream,
        add: bool,
    ) -> Result<Arc<dyn Completion>> {
        self.usable()?;
        let shared = self.shared();
        Stats::add(&shared.stats.bytes_out, gradient.bytes());
        if add {
            return self.push_addend(slot, gradient, stream);
        }
        let entry = self.at_rest(slot)?; // an update may still read the gradient before this one
        let fence = shared.device.fence(stream)?;
        let mut slot = self.matching(slot, &entry, gradient)?;
        let completion = slot.begin_gradient().send(|region| shared.device.copy_out(gradient, region, &fence))?;
        self.trace_gradient(&completion);
        if self.measuring.load(Relaxed) {
            let generation = slot.generation;
            drop(slot);
            self.queue().push(Job::Measure { entry, generation })?;
        }
        Ok(completion)
    }

    fn trace_gradient(&self, completion: &Arc<dyn Completion>) {
        let copy = Arc::clone(completion);
        self.shared().stats.trace.copy("gradient", Lane::Out, move || copy.is_done());
    }

    fn push_addend(&self, slot: usize, gradient: DeviceRange, stream: ComputeStream) -> Result<Arc<dyn Completion>> {
        let shared = self.shared();
        let entry = self.entry(slot)?;
        let mut staged = self.staged.lock().unwrap_or_else(PoisonError::into_inner);
        if *staged + gradient.bytes() > STAGING_BYTES {
            self.shared().stats.timed(Work::WaitInflight, || self.wait_for(self.queue().queued()))?;
            *staged = 0;
        }
        *staged += gradient.bytes();
        let generation = self.matching(slot, &entry, gradient)?.generation;
        let fence = shared.device.fence(stream)?;
        let region = shared.take_staging(gradient.bytes())?;
        let addend = shared.device.copy_out(gradient, region, &fence);
        let completion = addend.completion();
        self.trace_gradient(&completion);
        self.queue().push(Job::Accumulate { entry, addend, generation })?;
        Ok(completion)
    }

    /// Waits for a gradient to arrive. One that failed stops the engine: its values are lost.
    pub fn settle(&self, transfer: &dyn Completion) -> Result<()> {
        self.own_process()?;
        let waited = match transfer.is_done() {
            true => transfer.wait(),
            false => self.shared().stats.timed(Work::WaitInflight, || transfer.wait()),
        };
        self.shared().stats.trace.look();
        waited.map_err(|e| self.queue().fail("gradient copy", e))
    }

    /// Queues updates, in order; returns at once. Weights are sent after all that `stream` has queued. With `max_norm`
    /// gradients are scaled so that their global norm is at most that, and nothing happens if it is not finite.
    pub fn update(&self, updates: &[Update], max_norm: Option<f64>, stream: ComputeStream) -> Result<()> {
        self.usable()?;
        let fence = self.shared().device.fence(stream)?;
        let mut parts = Vec::with_capacity(updates.len());
        for update in updates {
            let entry = self.entry(update.slot)?;
            parts.push(Part { entry, weight: update.weight, hyper: update.hyper, scale: update.scale });
        }
        let asked = self.asked.swap(false, Relaxed);
        self.measuring.store(asked || max_norm.is_some(), Relaxed);
        let clip = max_norm.filter(|_| !parts.is_empty()).map(|max_norm| Arc::new(Clip::new(max_norm)));
        if let Some(clip) = &clip {
            let gradients = parts.iter().map(|part| (Arc::clone(&part.entry), part.scale)).collect();
            self.queue().push(Job::Clip { clip: Arc::clone(clip), gradients })?;
        }
        let mut parts = parts.into_iter().peekable();
        while parts.peek().is_some() {
            let (mut bucket, mut bytes) = (Vec::new(), 0);
            while bytes < BUCKET_BYTES
                && let Some(part) = parts.next()
            {
                bytes += part.weight.bytes();
                bucket.push(part);
            }
            let entries: Vec<_> = bucket.iter().map(|part| Arc::clone(&part.entry)).collect();
            let number = self.queue().push(Job::Update { parts: bucket, fence: fence.clone(), clip: clip.clone() })?;
            entries.iter().for_each(|entry| entry.update_job.store(number, Release));
        }
        Ok(())
    }

    /// Makes `stream` see the last update of these slots. Sleeps at most `slice` for the worker.
    pub fn ready(&self, slots: &[usize], stream: ComputeStream, slice: Duration) -> Result<Waited> {
        self.usable()?;
        let entries = slots.iter().map(|&slot| self.entry(slot)).collect::<Result<Vec<_>>>()?;
        let number = entries.iter().map(|entry| entry.update_job.load(Acquire)).max().unwrap_or(0);
        let shared = self.shared();
        let waited = shared.stats.timed(Work::WaitUpdate, || self.queue().wait(number, slice))?;
        if waited == Waited::Done {
            for entry in entries {
                let uploaded = entry.uploaded.lock().unwrap_or_else(PoisonError::into_inner).clone();
                if let Some(completion) = uploaded {
                    let gated = shared.device.gate(completion.as_ref(), stream);
                    gated.map_err(|e| self.queue().fail("upload", e))?;
                }
            }
        }
        Ok(waited)
    }

    /// Waits until all queued jobs are done, at most `slice`. Uploads may still be on their way.
    pub fn drain(&self, slice: Duration) -> Result<Waited> {
        self.usable()?;
        let number = self.queue().queued();
        match self.queue().is_done(number) {
            true => self.queue().wait(number, slice),
            false => self.shared().stats.timed(Work::WaitUpdate, || self.queue().wait(number, slice)),
        }
    }

    /// Takes over a weight that somebody else may have changed, and waits. Where it still is the rounding of its
    /// master, the master keeps its precision.
    pub fn merge_weight(&self, slot: usize, weight: DeviceRange, stream: ComputeStream) -> Result<()> {
        self.usable()?;
        let entry = self.at_rest(slot)?;
        let shared = self.shared();
        let precise = self.matching(slot, &entry, weight)?.precise();
        if !precise {
            return self.load_weight(slot, weight, stream);
        }
        let fence = shared.device.fence(stream)?;
        Stats::add(&shared.stats.bytes_out, weight.bytes());
        let (theirs, outcome) = shared.device.copy_out(weight, shared.take_staging(weight.bytes())?, &fence).wait();
        outcome.map(|()| entry.lock().merge(shared.level, &shared.pool, &theirs))?;
        shared.give_staging(theirs);
        Ok(())
    }

    /// Reads an array of a slot as fp32. Works after a failure too, so that nothing is lost.
    pub fn read_array(&self, slot: usize, which: Array, to: &mut [f32]) -> Result<()> {
        let entry = self.resting(slot, to.len())?;
        entry.lock().read(self.shared().level, which, to)
    }

    /// Replaces an array of a slot by fp32 values, rounded to nearest where it is kept in 16 bits.
    pub fn write_array(&self, slot: usize, which: Array, from: &[f32]) -> Result<()> {
        let entry = self.resting(slot, from.len())?;
        entry.lock().write(self.shared().level, which, from)
    }

    /// The entry of a slot of `numel` elements, at rest even after a failure.
    fn resting(&self, slot: usize, numel: usize) -> Result<Arc<Entry>> {
        self.own_process()?;
        let entry = self.entry(slot)?;
        // After a failure the queue drops its jobs: waiting for the number is enough.
        let number = entry.update_job.load(Acquire);
        while !self.queue().is_done(number) {
            let _ = self.queue().wait(number, Duration::from_millis(100));
            std::thread::yield_now();
        }
        let expected = entry.lock().spec.numel;
        if numel == expected {
            Ok(entry)
        } else {
            Err(Error::Slot { slot, why: format!("got {numel} elements, expected {expected}") })
        }
    }

    /// Reads the gradient of a slot as fp32.
    pub fn read_gradient(&self, slot: usize, to: &mut [f32]) -> Result<()> {
        self.usable()?;
        self.wait_for(self.queue().queued())?;
        self.entry(slot)?.lock().read_gradient(self.shared().level, to)
    }

    /// Sum of the squares of a slot's gradient.
    pub fn squares(&self, slot: usize) -> Result<f64> {
        self.usable()?;
        self.asked.store(true, Relaxed);
        self.wait_for(self.queue().queued())?;
        let (shared, entry) = (self.shared(), self.entry(slot)?);
        shared.stats.timed(Work::WaitUpdate, || entry.lock().squares(shared.level, &shared.pool, &shared.stats))
    }

    /// Replaces the gradient of a slot by fp32 values.
    pub fn write_gradient(&self, slot: usize, from: &[f32]) -> Result<()> {
        self.usable()?;
        self.wait_for(self.queue().queued())?;
        let shared = self.shared();
        self.entry(slot)?.lock().write_gradient(shared.level, from, &shared.arena, &shared.pool)
    }

    /// Whether a slot has a master beside or in its weight.
    pub fn has_master(&self, slot: usize) -> Result<bool> {
        Ok(self.entry(slot)?.lock().spec.master() != Master::None)
    }

    /// Updates done on a slot.
    pub fn step(&self, slot: usize) -> Result<u64> {
        self.own_process()?;
        Ok(self.entry(slot)?.lock().step)
    }

    /// Sets the number of updates done on a slot.
    pub fn set_step(&self, slot: usize, step: u64) -> Result<()> {
        self.at_rest(slot)?.lock().step = step;
        Ok(())
    }

    /// Host bytes of all slots by use: master, moments, gradients, wire; and idle staging.
    pub fn bytes(&self) -> [usize; 5] {
        let mut total = [0; 5];
        for entry in self.entries.read().unwrap_or_else(PoisonError::into_inner).iter() {
            for (sum, bytes) in total.iter_mut().zip(entry.lock().bytes()) {
                *sum += bytes;
            }
        }
        total[4] = self.shared().idle_staging().iter().map(crate::host::Region::bytes).sum();
        total
    }

    /// Pinned and pageable bytes.
    pub fn usage(&self) -> Usage {
        self.shared().arena.usage()
    }

    /// The refusal that made host memory pageable, if any.
    pub fn pin_refusal(&self) -> Option<Error> {
        self.shared().arena.refusal()
    }

    /// Counts a step of the caller.
    pub fn count_step(&self) {
        Stats::add(&self.shared().stats.steps, 1);
    }

    /// Counters since the engine was built.
    pub fn stats(&self) -> &Stats {
        &self.shared().stats
    }

    /// Update threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Instruction set in use.
    pub fn level(&self) -> Level {
        self.shared().level
    }

    /// Whether given-back memory is to be poisoned (host device under test).
    pub fn poisons(&self) -> bool {
        self.shared().device.faults().is_some_and(|f| f.poisons())
    }

    /// The error that stopped the engine, or that it is closed or forked.
    pub fn usable(&self) -> Result<()> {
        self.own_process()?;
        self.queue().check()
    }

    /// Finishes what is queued and stops the worker; afterwards no copy touches device memory any more.
    /// Later calls answer [`Error::Closed`].
    pub fn close(&self) {
        if self.own_process().is_err() {
            return;
        }
        self.queue().close();
        for entry in self.entries.read().unwrap_or_else(PoisonError::into_inner).iter() {
            entry.lock().settle();
        }
    }

    fn own_process(&self) -> Result<()> {
        let child = std::process::id();
        if child == self.process { Ok(()) } else { Err(Error::Forked { parent: self.process, child }) }
    }

    fn entry(&self, slot: usize) -> Result<Arc<Entry>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let why = || format!("expected a number below {}", entries.len());
        entries.get(slot).cloned().ok_or_else(|| Error::Slot { slot, why: why() })
    }

    /// The entry, once no queued job updates it.
    fn at_rest(&self, slot: usize) -> Result<Arc<Entry>> {
        let entry = self.entry(slot)?;
        let number = entry.update_job.load(Acquire);
        match self.queue().is_done(number) {
            true => self.wait_for(number)?,
            false => self.shared().stats.timed(Work::WaitUpdate, || self.wait_for(number))?,
        }
        Ok(entry)
    }

    fn wait_for(&self, number: u64) -> Result<()> {
        while self.queue().wait(number, Duration::from_secs(1))? == Waited::Pending {}
        Ok(())
    }

    fn matching<'a>(
        &self,
        number: usize,
        entry: &'a Entry,
        range: DeviceRange,
    ) -> Result<std::sync::MutexGuard<'a, Slot>> {
        let slot = entry.lock();
        let expected = slot.spec.numel * slot.spec.weight.size();
        if range.bytes() == expected {
            return Ok(slot);
        }
        Err(Error::Slot { slot: number, why: format!("got {} bytes, expected {expected}", range.bytes()) })
    }

    fn queue(&self) -> &Queue {
        &self.parts.as_ref().expect("present until dropped").0
    }

    fn shared(&self) -> &Shared {
        &self.parts.as_ref().expect("present until dropped").1
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.own_process().is_ok() {
            self.queue().close();
        } else {
            std::mem::forget(self.parts.take());
            std::mem::forget(std::mem::take(&mut self.entries));
        }
    }
}
