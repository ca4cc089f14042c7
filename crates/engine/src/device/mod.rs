//! A device as the engine sees it: something to copy from and to, in order.
//!
//! Two implementations. `cuda` drives the torch primary context with streams of its own; `host` is plain
//! RAM whose copies run on worker threads and can be delayed, failed and poisoned, so that ordering bugs
//! show on any machine.
//!
//! **Ordering is a type.** A copy takes the host [`Region`] it works on and returns a [`Ticket`] that owns
//! it; only a waited ticket gives the region back. What the device has queued before a copy is named by a
//! [`Fence`].

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::host::{Pinner, Region};

#[cfg(feature = "cuda")]
pub mod cuda;
mod faults;
mod host;

pub use faults::{Faults, Injector};
pub use host::HostDevice;

/// A range of device memory that somebody else (torch) owns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceRange {
    address: u64,
    bytes: usize,
}

impl DeviceRange {
    /// # Safety
    /// `address..address + bytes` is memory of the device that the range is used with. It stays allocated
    /// until every copy made with it has completed, and the caller orders its other users by fences and gates.
    pub unsafe fn new(address: u64, bytes: usize) -> Self {
        DeviceRange { address, bytes }
    }

    /// First byte.
    pub fn address(self) -> u64 {
        self.address
    }

    /// Length in bytes.
    pub fn bytes(self) -> usize {
        self.bytes
    }
}

/// A stream of the caller, by its driver handle (0 is the legacy default stream).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComputeStream(pub u64);

/// A point in a compute stream: all that was queued before it.
#[derive(Debug, Clone)]
pub struct Fence(pub(crate) Option<Arc<dyn Any + Send + Sync>>);

impl Fence {
    /// A fence that is already passed.
    pub fn passed() -> Self {
        Fence(None)
    }
}

/// The end of one copy. Waiting sleeps; it never spins and needs no interpreter lock.
pub trait Completion: Send + Sync + fmt::Debug {
    /// Whether the copy is over, well or not.
    fn is_done(&self) -> bool;
    /// Sleeps until the copy is over.
    fn wait(&self) -> Result<()>;
    /// For the device that made it.
    fn as_any(&self) -> &dyn Any;
}

/// A copy under way, and the host region it reads or writes.
///
/// Dropping a ticket waits first, because the region's bytes must not be reused under a running copy.
#[derive(Debug)]
pub struct Ticket {
    region: Option<Region>,
    completion: Arc<dyn Completion>,
}

impl Ticket {
    pub(crate) fn new(region: Region, completion: Arc<dyn Completion>) -> Self {
        Ticket { region: Some(region), completion }
    }

    /// The end of this copy, to be waited for by others.
    pub fn completion(&self) -> Arc<dyn Completion> {
        Arc::clone(&self.completion)
    }

    /// Waits, and gives the region back whether or not the copy went well.
    pub fn wait(mut self) -> (Region, Result<()>) {
        let outcome = self.completion.wait();
        let region = self.region.take().expect("a ticket holds its region until waited");
        (region, outcome)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.region.is_some() {
            let _ = self.completion.wait();
        }
    }
}

/// Copies between host regions and device memory, one queue in each direction.
pub trait Device: Pinner {
    /// Name for messages, like `cuda:0`.
    fn name(&self) -> String;

    /// Marks all that `stream` has queued so far.
    fn fence(&self, stream: ComputeStream) -> Result<Fence>;

    /// Queues device → host after `after`; fills the first `from.bytes()` bytes of `to`.
    fn copy_out(&self, from: DeviceRange, to: Region, after: &Fence) -> Ticket;

    /// Queues host → device after `after`; sends the first `to.bytes()` bytes of `from`.
    fn copy_in(&self, from: Region, to: DeviceRange, after: &Fence) -> Ticket;

    /// Makes `stream` wait for a copy of this device; on devices without streams the caller waits.
    fn gate(&self, completion: &dyn Completion, stream: ComputeStream) -> Result<()>;

    /// The injected faults, if this is a device under test.
    fn faults(&self) -> Option<&Injector> {
        None
    }
}

/// Opens a device by its torch name: `cpu` (the host device) or `cuda:N`.
///
/// # Errors
/// [`Error::NoDevice`] when it is not there; never panics for want of a driver.
pub fn open(name: &str, faults: Option<Faults>) -> Result<Arc<dyn Device>> {
    let no_device = |why: &str| Error::NoDevice { device: name.into(), why: why.into() };
    if name == "cpu" {
        return Ok(Arc::new(HostDevice::new(faults.unwrap_or_default())?));
    }
    if faults.is_some() {
        return Err(no_device("faults can be injected on the host device only"));
    }
    let ordinal = name.strip_prefix("cuda:").and_then(|n| n.parse::<usize>().ok());
    match ordinal {
        #[cfg(feature = "cuda")]
        Some(ordinal) => Ok(Arc::new(cuda::CudaDevice::open(ordinal)?)),
        #[cfg(not(feature = "cuda"))]
        Some(_) => Err(no_device("this build has no CUDA feature")),
        None => Err(no_device("expected cpu or cuda:N")),
    }
}
