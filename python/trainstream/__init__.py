"""Train PyTorch models larger than the GPU's memory: ``model, optimizer = trainstream.wrap(model, optimizer)``."""

import logging

from ._engine import (
    ClosedError,
    ConfigError,
    DeviceError,
    InternalError,
    ParameterError,
    PinError,
    TrainStreamError,
    __version__,
    build_info,
)
from .grads import StreamedGrad
from .optimizer import OffloadAdamW
from .wrapping import memory_report, report, unwrap, wrap

logging.getLogger("trainstream").addHandler(logging.NullHandler())

__all__ = [
    "ClosedError",
    "ConfigError",
    "DeviceError",
    "InternalError",
    "OffloadAdamW",
    "ParameterError",
    "PinError",
    "StreamedGrad",
    "TrainStreamError",
    "__version__",
    "build_info",
    "memory_report",
    "report",
    "unwrap",
    "wrap",
]
