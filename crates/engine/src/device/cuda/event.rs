//! Pooled events. `BLOCKING_SYNC` lets host waits sleep, so they leave the cores to the optimizer.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{DriverError, result, sys};

use crate::device::Completion;
use crate::error::{Error, Result};

use super::{Context, describe};

/// Idle events, reused.
#[derive(Debug)]
pub(super) struct Events {
    context: Arc<Context>,
    idle: Mutex<Vec<Raw>>,
}

#[derive(Debug, Clone, Copy)]
struct Raw(sys::CUevent);

// SAFETY: event handles may be used from any thread with the context bound.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

impl Events {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Events { context, idle: Mutex::default() }
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Raw>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records all that `stream` has queued. The context must be bound.
    pub(super) fn record(self: &Arc<Self>, stream: sys::CUstream) -> Result<Event, DriverError> {
        let raw = self.idle().pop();
        let raw = match raw {
            Some(raw) => raw,
            None => {
                use sys::CUevent_flags_enum::{CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING};
                let mut event = std::ptr::null_mut();
                let flags = CU_EVENT_BLOCKING_SYNC as u32 | CU_EVENT_DISABLE_TIMING as u32;
                // SAFETY: writes one handle; the context is bound.
                unsafe { sys::cuEventCreate(&mut event, flags) }.result()?;
                Raw(event)
            }
        };
        let event = Event { raw, events: Arc::clone(self) };
        // SAFETY: both handles are live; a foreign stream is torch's current one, alive during the call.
        unsafe { result::event::record(event.raw.0, stream) }?;
        Ok(event)
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            for raw in self.idle().drain(..) {
                // SAFETY: idle events are ours and nobody waits for them.
                let _ = unsafe { result::event::destroy(raw.0) };
            }
        }
    }
}

/// A recorded event; returns to the pool when dropped.
#[derive(Debug)]
pub(super) struct Event {
    raw: Raw,
    events: Arc<Events>,
}

impl Event {
    /// Makes `stream` wait for this event, without the host. The context must be bound.
    pub(super) fn hold(&self, stream: sys::CUstream) -> Result<(), DriverError> {
        use sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event is live and recorded; the stream as in `record`.
        unsafe { result::stream::wait_event(stream, self.raw.0, CU_EVENT_WAIT_DEFAULT) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // Re-recording does not disturb streams that already wait: they captured this record.
        self.events.idle().push(self.raw);
    }
}

impl Completion for Event {
    fn is_done(&self) -> bool {
        // SAFETY: the event is live. Any answer but "not ready" ends the wait; `wait` reports errors.
        let answer = self.events.context.bind().map(|()| unsafe { sys::cuEventQuery(self.raw.0) });
        !matches!(answer, Ok(sys::CUresult::CUDA_ERROR_NOT_READY))
    }

    fn wait(&self) -> Result<()> {
        // SAFETY: the event is live.
        let waited = self.events.context.bind().and_then(|()| unsafe { result::event::synchronize(self.raw.0) });
        waited.map_err(|e| Error::Device { device: "cuda".into(), call: "wait for a copy", why: describe(e) })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A copy that the driver refused.
#[derive(Debug)]
pub(super) struct Failed(pub(super) Error);

impl Completion for Failed {
    fn is_done(&self) -> bool {
        true
    }

    fn wait(&self) -> Result<()> {
        Err(self.0.clone())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
