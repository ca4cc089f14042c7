//! The CUDA device: torch's primary context, one copy stream in each direction, pooled events that sleep.
//!
//! The driver library is loaded at run time; [`CudaDevice::open`] answers with an error where there is
//! none. Only this folder imports `cudarc`, and everything it shows is safe.

mod event;

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{DriverError, result, sys};

use crate::error::{Error, Result};
use crate::host::{Pinner, Region};

use super::{Completion, ComputeStream, Device, DeviceRange, Fence, Ticket};
use event::{Event, Events, Failed};

/// Visible to every context of the process (`CU_MEMHOSTREGISTER_PORTABLE`).
const PORTABLE: u32 = 1;

/// One GPU.
#[derive(Debug)]
pub struct CudaDevice {
    ordinal: usize,
    context: Arc<Context>,
    events: Arc<Events>,
    out: Stream,
    back: Stream,
}

impl CudaDevice {
    /// Opens GPU `ordinal` in torch's numbering.
    ///
    /// # Errors
    /// [`Error::NoDevice`] without a driver or without that GPU.
    pub fn open(ordinal: usize) -> Result<Self> {
        let no_device = |why: String| Error::NoDevice { device: format!("cuda:{ordinal}"), why };
        // SAFETY: only tries to load the driver library.
        if !unsafe { sys::is_culib_present() } {
            return Err(no_device("the CUDA driver library is not installed".into()));
        }
        let opened = (|| -> Result<Self, DriverError> {
            result::init()?;
            let context = Arc::new(Context::retain(ordinal)?);
            context.bind()?;
            Ok(CudaDevice {
                ordinal,
                events: Arc::new(Events::new(Arc::clone(&context))),
                out: Stream::new(Arc::clone(&context))?,
                back: Stream::new(Arc::clone(&context))?,
                context,
            })
        })();
        opened.map_err(|e| no_device(describe(e)))
    }

    fn error(&self, call: &'static str, e: DriverError) -> Error {
        Error::Device { device: self.name(), call, why: describe(e) }
    }

    /// Queues `copy` on `stream` after the fence; a refusal becomes a ticket that fails when waited.
    fn queue(
        &self,
        region: Region,
        stream: &Stream,
        after: &Fence,
        call: &'static str,
        copy: impl FnOnce() -> sys::CUresult,
    ) -> Ticket {
        let queued = (|| {
            self.context.bind()?;
            if let Some(event) = after.0.as_deref().and_then(|f| f.downcast_ref::<Event>()) {
                event.hold(stream.raw)?;
            }
            copy().result()?;
            self.events.record(stream.raw)
        })();
        let completion: Arc<dyn Completion> = match queued {
            Ok(event) => Arc::new(event),
            Err(e) => Arc::new(Failed(self.error(call, e))),
        };
        Ticket::new(region, completion)
    }
}

impl Pinner for CudaDevice {
    fn pin(&self, start: *mut u8, bytes: usize) -> Result<(), String> {
        self.context.bind().map_err(describe)?;
        // SAFETY: the slab owns `bytes` bytes from `start` and unpins before it unmaps them.
        unsafe { sys::cuMemHostRegister_v2(start.cast::<c_void>(), bytes, PORTABLE) }.result().map_err(describe)
    }

    fn unpin(&self, start: *mut u8) {
        if self.context.bind().is_ok() {
            // SAFETY: `start` was registered by `pin`; an error here has nobody left to hear it.
            let _ = unsafe { sys::cuMemHostUnregister(start.cast::<c_void>()) };
        }
    }
}

impl Device for CudaDevice {
    fn name(&self) -> String {
        format!("cuda:{}", self.ordinal)
    }

    fn fence(&self, stream: ComputeStream) -> Result<Fence> {
        let event = self.context.bind().and_then(|()| self.events.record(stream.0 as sys::CUstream));
        Ok(Fence(Some(Arc::new(event.map_err(|e| self.error("record a fence", e))?))))
    }

    fn copy_out(&self, from: DeviceRange, to: Region, after: &Fence) -> Ticket {
        assert!(from.bytes() <= to.bytes(), "copy of {} bytes into a region of {}", from.bytes(), to.bytes());
        let target = to.as_ptr().cast::<c_void>();
        // SAFETY: the ticket owns the region until the copy is over; the range is covered by its contract.
        self.queue(to, &self.out, after, "copy a gradient out", || unsafe {
            sys::cuMemcpyDtoHAsync_v2(target, from.address(), from.bytes(), self.out.raw)
        })
    }

    fn copy_in(&self, from: Region, to: DeviceRange, after: &Fence) -> Ticket {
        assert!(to.bytes() <= from.bytes(), "copy of {} bytes from a region of {}", to.bytes(), from.bytes());
        let source = from.as_ptr().cast::<c_void>().cast_const();
        // SAFETY: as in `copy_out`.
        self.queue(from, &self.back, after, "copy a weight in", || unsafe {
            sys::cuMemcpyHtoDAsync_v2(to.address(), source, to.bytes(), self.back.raw)
        })
    }

    fn gate(&self, completion: &dyn Completion, stream: ComputeStream) -> Result<()> {
        match completion.as_any().downcast_ref::<Event>() {
            Some(event) => self
                .context
                .bind()
                .and_then(|()| event.hold(stream.0 as sys::CUstream))
                .map_err(|e| self.error("gate a stream", e)),
            None => completion.wait(),
        }
    }
}

fn describe(e: DriverError) -> String {
    match (e.error_name(), e.error_string()) {
        (Ok(name), Ok(text)) => format!("{}: {}", name.to_string_lossy(), text.to_string_lossy()),
        _ => format!("driver error {}", e.0 as u32),
    }
}

/// The retained primary context. Never released: at exit the driver may already be gone, and torch
/// holds the same context anyway.
#[derive(Debug)]
struct Context(sys::CUcontext);

// SAFETY: a context handle may be used from any thread that binds it first.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    fn retain(ordinal: usize) -> Result<Self, DriverError> {
        let device = result::device::get(i32::try_from(ordinal).unwrap_or(i32::MAX))?;
        // SAFETY: `device` was just obtained from the initialised driver.
        Ok(Context(unsafe { result::primary_ctx::retain(device) }?))
    }

    /// Makes the context current on this thread.
    fn bind(&self) -> Result<(), DriverError> {
        // SAFETY: the context is retained for the life of the process.
        unsafe { result::ctx::set_current(self.0) }
    }
}

/// A non-blocking stream of our own; destroyed after its work is over.
#[derive(Debug)]
struct Stream {
    raw: sys::CUstream,
    context: Arc<Context>,
}

// SAFETY: stream handles may be used from any thread with the context bound.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    fn new(context: Arc<Context>) -> Result<Self, DriverError> {
        Ok(Stream { raw: result::stream::create(result::stream::StreamKind::NonBlocking)?, context })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: our own stream, destroyed once.
            let _ = unsafe { result::stream::synchronize(self.raw).and_then(|()| result::stream::destroy(self.raw)) };
        }
    }
}
