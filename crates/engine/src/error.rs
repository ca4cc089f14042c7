//! One error for the whole engine. Each variant carries its numbers; the text is lower case, with the
//! knob to turn where there is one. The bindings map variants to Python exceptions in one place.

#![forbid(unsafe_code)]

use std::sync::Arc;

/// What can go wrong in the engine.
///
/// Cloneable, because an error on the worker thread is kept and raised at every later call.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option that the engine cannot honour.
    #[error("{option}={value}: {allowed}")]
    Config {
        /// Name of the option as the user wrote it.
        option: &'static str,
        /// The value given.
        value: String,
        /// What is allowed instead.
        allowed: String,
    },
    /// A parameter slot that does not exist, or used in a way its layout does not allow.
    #[error("slot {slot}: {why}")]
    Slot {
        /// The slot number.
        slot: usize,
        /// What is wrong with it.
        why: String,
    },
    /// Host memory could not be reserved.
    #[error("cannot reserve {bytes} bytes of host memory: {why}")]
    OutOfHostMemory {
        /// Bytes asked for.
        bytes: usize,
        /// The operating system's answer.
        why: String,
    },
    /// Host memory could not be page-locked.
    #[error(
        "cannot pin {bytes} bytes of host memory after {pinned} pinned bytes: {why}; pin=\"auto\" continues with pageable memory"
    )]
    Pin {
        /// Bytes in the refused registration.
        bytes: usize,
        /// Bytes that were pinned before it.
        pinned: usize,
        /// The driver's answer.
        why: String,
    },
    /// The device or its driver refused a call.
    #[error("{call} on {device}: {why}")]
    Device {
        /// Which device.
        device: String,
        /// Which operation.
        call: &'static str,
        /// The driver's answer.
        why: String,
    },
    /// The device asked for does not exist on this machine.
    #[error("no such device {device}: {why}")]
    NoDevice {
        /// Which device.
        device: String,
        /// Why it cannot be used.
        why: String,
    },
    /// The worker failed earlier; nothing was updated since.
    #[error("the engine stopped in {job}: {source}; its state can still be read and saved")]
    Stopped {
        /// What the worker was doing.
        job: &'static str,
        /// What stopped it.
        source: Arc<Error>,
    },
    /// The engine was closed (at exit, or by `unwrap`).
    #[error("the engine is closed")]
    Closed,
    /// The engine was inherited through `fork` and has no threads in this process.
    #[error("the engine belongs to process {parent}, this is process {child}: wrap the model after the fork")]
    Forked {
        /// The process that built the engine.
        parent: u32,
        /// The process that called it.
        child: u32,
    },
    /// A bug of ours: a panic that was caught.
    #[error("internal error: {0}")]
    Panic(String),
    /// An operating system error while starting threads.
    #[error("cannot start {what}: {why}")]
    Threads {
        /// What was to be started.
        what: &'static str,
        /// The operating system's answer.
        why: String,
    },
}

/// Shorthand used throughout the engine.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// The text of a caught panic.
    pub fn from_panic(payload: Box<dyn std::any::Any + Send>) -> Self {
        let text = payload
            .downcast_ref::<&str>()
            .map(ToString::to_string)
            .or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "panic without a message".into());
        Error::Panic(text)
    }
}
