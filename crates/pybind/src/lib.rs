//! `trainstream._engine`: the bindings. Checked arguments in, exceptions out, no arithmetic.

mod door;
mod engine;
mod errors;
mod tensor;

use pyo3::prelude::*;

/// The compiled part of trainstream. Private: use the `trainstream` package.
#[pymodule]
mod _engine {
    #[pymodule_export]
    use super::build_info;
    #[pymodule_export]
    use super::engine::{PyEngine, PyTransfer};
    #[pymodule_export]
    use super::errors::{
        ClosedError, ConfigError, DeviceError, InternalError, ParameterError, PinError, TrainStreamError,
    };
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}

/// Version, features and CPU levels of this build.
#[pyfunction]
fn build_info(py: Python<'_>) -> PyResult<Bound<'_, pyo3::types::PyDict>> {
    use trainstream_engine::optim::Level;
    let info = pyo3::types::PyDict::new(py);
    info.set_item("version", env!("CARGO_PKG_VERSION"))?;
    info.set_item("profile", if cfg!(debug_assertions) { "debug" } else { "release" })?;
    info.set_item("features", trainstream_engine::FEATURES)?;
    info.set_item("cpu", Level::detect().map_err(errors::raise)?.name())?;
    info.set_item("cpu_available", Level::available().iter().map(|l| l.name()).collect::<Vec<_>>())?;
    Ok(info)
}
