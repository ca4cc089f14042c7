//! The numbered job queue between the caller and the worker thread.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

use super::{Job, Shared};

/// Answer of a bounded wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waited {
    /// What was waited for has happened.
    Done,
    /// Not yet; look for signals and ask again.
    Pending,
}

#[derive(Debug, Default)]
struct State {
    jobs: VecDeque<Job>,
    queued: u64,
    done: u64,
    closing: bool,
    failed: Option<Error>,
}

#[derive(Debug, Default)]
struct Inner {
    state: Mutex<State>,
    changed: Condvar,
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Queue and thread.
#[derive(Debug)]
pub struct Queue {
    inner: Arc<Inner>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Queue {
    /// Starts the worker on `shared`.
    pub fn start(shared: Arc<Shared>) -> Result<Self> {
        let inner = Arc::new(Inner::default());
        let theirs = Arc::clone(&inner);
        let thread = std::thread::Builder::new()
            .name("trainstream-work".into())
            .spawn(move || work(&theirs, &shared))
            .map_err(|e| Error::Threads { what: "the worker", why: e.to_string() })?;
        Ok(Queue { inner, thread: Mutex::new(Some(thread)) })
    }

    /// Queues a job and returns its number.
    pub fn push(&self, job: Job) -> Result<u64> {
        let mut state = self.inner.lock();
        check(&state)?;
        state.jobs.push_back(job);
        state.queued += 1;
        self.inner.changed.notify_all();
        Ok(state.queued)
    }

    /// Number of the last job queued.
    pub fn queued(&self) -> u64 {
        self.inner.lock().queued
    }

    /// Whether job `number` is done.
    pub fn is_done(&self, number: u64) -> bool {
        self.inner.lock().done >= number
    }

    /// Waits until job `number` is done, at most `slice`.
    pub fn wait(&self, number: u64, slice: Duration) -> Result<Waited> {
        let end = Instant::now() + slice;
        let mut state = self.inner.lock();
        loop {
            check_failed(&state)?;
            if state.done >= number {
                return Ok(Waited::Done);
            }
            let Some(left) = end.checked_duration_since(Instant::now()).filter(|d| !d.is_zero()) else {
                return Ok(Waited::Pending);
            };
            state = self.inner.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The error that stopped the worker, or that the queue is closed.
    pub fn check(&self) -> Result<()> {
        check(&self.inner.lock())
    }

    /// Stops the worker with an error found elsewhere.
    pub fn fail(&self, job: &'static str, error: Error) -> Error {
        fail(&mut self.inner.lock(), job, error)
    }

    /// Lets the worker finish what is queued, then joins it. Later pushes answer [`Error::Closed`].
    pub fn close(&self) {
        self.inner.lock().closing = true;
        self.inner.changed.notify_all();
        if let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = thread.join();
        }
    }
}

fn check_failed(state: &State) -> Result<()> {
    state.failed.clone().map_or(Ok(()), Err)
}

fn check(state: &State) -> Result<()> {
    check_failed(state)?;
    if state.closing { Err(Error::Closed) } else { Ok(()) }
}

fn fail(state: &mut State, job: &'static str, error: Error) -> Error {
    let stopped = match error {
        Error::Stopped { .. } => error,
        source => Error::Stopped { job, source: Arc::new(source) },
    };
    state.failed.get_or_insert(stopped).clone()
}

fn work(inner: &Inner, shared: &Shared) {
    let mut state = inner.lock();
    loop {
        let Some(job) = state.jobs.pop_front() else {
            if state.closing {
                return;
            }
            state = inner.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        let (name, dropped) = (job.name(), state.failed.is_some());
        drop(state);
        let outcome = if dropped {
            Ok(())
        } else {
            catch_unwind(AssertUnwindSafe(|| job.run(shared))).unwrap_or_else(|p| Err(Error::from_panic(p)))
        };
        state = inner.lock();
        if let Err(error) = outcome {
            fail(&mut state, name, error);
        }
        state.done += 1;
        inner.changed.notify_all();
    }
}
