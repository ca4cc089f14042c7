//! The one door into the engine: it releases the interpreter lock, turns panics and errors into
//! exceptions, and looks for signals between the slices of a long wait.

#![forbid(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use pyo3::prelude::*;
use trainstream_engine::flow::Waited;
use trainstream_engine::{Error, Result};

use crate::errors::raise;

/// How long a wait sleeps before it looks for Ctrl-C.
const SLICE: Duration = Duration::from_millis(100);

/// Runs `f` without the interpreter lock.
pub(crate) fn enter<T: Send>(py: Python<'_>, f: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    py.detach(|| catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|p| Err(Error::from_panic(p)))).map_err(raise)
}

/// Repeats a bounded wait until it is done, or a signal handler raises.
pub(crate) fn wait(py: Python<'_>, f: impl Fn(Duration) -> Result<Waited> + Send + Sync) -> PyResult<()> {
    while enter(py, || f(SLICE))? == Waited::Pending {
        py.check_signals()?;
    }
    Ok(())
}
