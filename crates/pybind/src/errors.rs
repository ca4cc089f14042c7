//! The exception tree, and the one match from engine errors to it.

#![forbid(unsafe_code)]

use pyo3::create_exception;
use pyo3::exceptions::{PyMemoryError, PyRuntimeError};
use pyo3::prelude::*;
use trainstream_engine::Error;

create_exception!(trainstream, TrainStreamError, PyRuntimeError, "Base of all errors of trainstream.");
create_exception!(trainstream, ConfigError, TrainStreamError, "An option that cannot be honoured.");
create_exception!(trainstream, ParameterError, TrainStreamError, "A parameter or its gradient that cannot be trained.");
create_exception!(trainstream, DeviceError, TrainStreamError, "The device is absent, or refused a call.");
create_exception!(trainstream, PinError, DeviceError, "Host memory could not be page-locked.");
create_exception!(trainstream, ClosedError, TrainStreamError, "The engine is closed, or belongs to another process.");
create_exception!(trainstream, InternalError, TrainStreamError, "A bug of trainstream; please report it.");

/// The exception for an engine error. A stopped engine raises the kind of what stopped it.
pub(crate) fn raise(error: Error) -> PyErr {
    let text = error.to_string();
    raise_as(&error, text)
}

fn raise_as(error: &Error, text: String) -> PyErr {
    match error {
        Error::Config { .. } => ConfigError::new_err(text),
        Error::Slot { .. } => ParameterError::new_err(text),
        Error::OutOfHostMemory { .. } => PyMemoryError::new_err(text),
        Error::Pin { .. } => PinError::new_err(text),
        Error::Device { .. } | Error::NoDevice { .. } => DeviceError::new_err(text),
        Error::Stopped { source, .. } => raise_as(source, text),
        Error::Closed | Error::Forked { .. } => ClosedError::new_err(text),
        _ => InternalError::new_err(text),
    }
}
