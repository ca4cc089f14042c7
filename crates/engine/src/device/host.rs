//! The host device: "device memory" is RAM, copies run on two worker threads (out and in), in order, like
//! the copy streams of a GPU. Compute is synchronous, so a fence is always passed and a gate is a wait.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use crate::error::{Error, Result};
use crate::host::{Pinner, Region};

use super::{Completion, ComputeStream, Device, DeviceRange, Faults, Fence, Injector, Ticket};

/// Plain RAM behind the [`Device`] trait, with injectable [`Faults`].
#[derive(Debug)]
pub struct HostDevice {
    faults: Arc<Injector>,
    pinned: AtomicU64,
    out: Lane,
    back: Lane,
}

impl HostDevice {
    /// Starts the two copy threads.
    pub fn new(faults: Faults) -> Result<Self> {
        let faults = Arc::new(Injector::new(faults));
        Ok(HostDevice {
            pinned: AtomicU64::new(0),
            out: Lane::start("trainstream-out", Arc::clone(&faults))?,
            back: Lane::start("trainstream-in", Arc::clone(&faults))?,
            faults,
        })
    }
}

impl Pinner for HostDevice {
    fn pin(&self, _start: *mut u8, bytes: usize) -> Result<(), String> {
        let pinned = self.pinned.fetch_add(bytes as u64, Relaxed) + bytes as u64;
        match self.faults.faults.pin_limit {
            Some(limit) if pinned > limit => Err(format!("injected limit of {limit} bytes")),
            _ => Ok(()),
        }
    }

    fn unpin(&self, _start: *mut u8) {}
}

impl Device for HostDevice {
    fn name(&self) -> String {
        "cpu".into()
    }

    fn fence(&self, _stream: ComputeStream) -> Result<Fence> {
        Ok(Fence::passed())
    }

    fn copy_out(&self, from: DeviceRange, to: Region, _after: &Fence) -> Ticket {
        assert!(from.bytes() <= to.bytes(), "copy of {} bytes into a region of {}", from.bytes(), to.bytes());
        let target = to.as_ptr() as u64;
        let done = self.out.queue(Copy { from: from.address(), to: target, bytes: from.bytes() });
        Ticket::new(to, done)
    }

    fn copy_in(&self, from: Region, to: DeviceRange, _after: &Fence) -> Ticket {
        assert!(to.bytes() <= from.bytes(), "copy of {} bytes from a region of {}", to.bytes(), from.bytes());
        let source = from.as_ptr() as u64;
        let done = self.back.queue(Copy { from: source, to: to.address(), bytes: to.bytes() });
        Ticket::new(from, done)
    }

    fn gate(&self, completion: &dyn Completion, _stream: ComputeStream) -> Result<()> {
        completion.wait()
    }

    fn faults(&self) -> Option<&Injector> {
        Some(&self.faults)
    }
}

struct Copy {
    from: u64,
    to: u64,
    bytes: usize,
}

#[derive(Debug, Default)]
struct Done {
    outcome: Mutex<Option<Result<()>>>,
    signal: Condvar,
}

impl Completion for Done {
    fn is_done(&self) -> bool {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn wait(&self) -> Result<()> {
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match &*outcome {
                Some(result) => return result.clone(),
                None => outcome = self.signal.wait(outcome).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Done {
    fn set(&self, result: Result<()>) {
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        self.signal.notify_all();
    }
}

/// One copy thread and its queue.
#[derive(Debug)]
struct Lane {
    queue: Option<Sender<(Copy, Arc<Done>)>>,
    thread: Option<JoinHandle<()>>,
    process: u32,
}

impl Lane {
    fn start(name: &'static str, faults: Arc<Injector>) -> Result<Self> {
        let (queue, jobs) = channel::<(Copy, Arc<Done>)>();
        let work = move || {
            for (copy, done) in jobs {
                faults.delay();
                if faults.copy_fails() {
                    done.set(Err(Error::Device { device: "cpu".into(), call: "copy", why: "injected failure".into() }));
                    continue;
                }
                // SAFETY: the ticket keeps the host region alive, the contract of `DeviceRange` the other
                // side; they belong to different owners, so they do not overlap.
                unsafe { std::ptr::copy_nonoverlapping(copy.from as *const u8, copy.to as *mut u8, copy.bytes) };
                done.set(Ok(()));
            }
        };
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(work)
            .map_err(|e| Error::Threads { what: "a copy thread", why: e.to_string() })?;
        Ok(Lane { queue: Some(queue), thread: Some(thread), process: std::process::id() })
    }

    fn queue(&self, copy: Copy) -> Arc<dyn Completion> {
        let done = Arc::new(Done::default());
        if let Some(queue) = &self.queue
            && queue.send((copy, Arc::clone(&done))).is_err()
        {
            done.set(Err(Error::Closed));
        }
        done
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.queue = None;
        // A forked child has the handle but not the thread.
        if let Some(thread) = self.thread.take()
            && self.process == std::process::id()
        {
            let _ = thread.join();
        }
    }
}
