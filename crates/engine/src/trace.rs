//! Spans of what happened when, kept in a ring while somebody asked for them.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Spans kept; older ones are dropped. A step of 400 parameters makes about 2,000.
const CAPACITY: usize = 1 << 18;

/// Where a span is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// The thread that trains.
    Caller,
    /// The worker and its pool.
    Worker,
    /// Copies from the device; they overlap.
    Out,
    /// Copies to the device; they overlap.
    In,
}

impl Lane {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Lane::Caller => "caller",
            Lane::Worker => "worker",
            Lane::Out => "out",
            Lane::In => "in",
        }
    }
}

/// Something that took time; one without length is a mark.
#[derive(Debug, Clone)]
pub struct Span {
    /// What.
    pub name: String,
    /// Where.
    pub lane: Lane,
    /// From when, since tracing began.
    pub start: Duration,
    /// Until when.
    pub end: Duration,
}

/// A copy that is not known to be over.
struct Flight {
    name: &'static str,
    lane: Lane,
    start: Instant,
    is_done: Box<dyn Fn() -> bool + Send>,
}

/// The ring.
pub struct Trace {
    on: AtomicBool,
    origin: Instant,
    spans: Mutex<VecDeque<Span>>,
    flights: Mutex<Vec<Flight>>,
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trace").field("on", &self.on).field("spans", &self.spans().len()).finish()
    }
}

impl Default for Trace {
    fn default() -> Self {
        let on = AtomicBool::new(false);
        Trace { on, origin: Instant::now(), spans: Mutex::default(), flights: Mutex::default() }
    }
}

impl Trace {
    /// Starts recording.
    pub fn start(&self) {
        self.on.store(true, Relaxed);
    }

    /// Records a span.
    pub fn add(&self, name: impl Into<String>, lane: Lane, start: Instant, end: Instant) {
        if !self.on.load(Relaxed) {
            return;
        }
        let mut spans = self.spans();
        if spans.len() == CAPACITY {
            spans.pop_front();
        }
        spans.push_back(Span { name: name.into(), lane, start: start - self.origin, end: end - self.origin });
    }

    /// Records a copy that starts now, from when it was queued until somebody sees that it is over.
    pub fn copy(&self, name: &'static str, lane: Lane, is_done: impl Fn() -> bool + Send + 'static) {
        if self.on.load(Relaxed) {
            let flight = Flight { name, lane, start: Instant::now(), is_done: Box::new(is_done) };
            self.flights.lock().unwrap_or_else(PoisonError::into_inner).push(flight);
        }
    }

    /// Looks for copies that are over.
    pub fn look(&self) {
        if !self.on.load(Relaxed) {
            return;
        }
        let mut flights = self.flights.lock().unwrap_or_else(PoisonError::into_inner);
        for flight in flights.extract_if(.., |flight| (flight.is_done)()) {
            self.add(flight.name, flight.lane, flight.start, Instant::now());
        }
    }

    /// Copies of all spans, by their end.
    pub fn all(&self) -> Vec<Span> {
        self.look();
        self.spans().iter().cloned().collect()
    }

    fn spans(&self) -> MutexGuard<'_, VecDeque<Span>> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
