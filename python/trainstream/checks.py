"""Checks of what the user hands in, before anything is changed. Every message names the culprit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ._engine import ConfigError, ParameterError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: Options of later versions, with the values that mean "as today".
NOT_YET: Mapping[str, tuple[Any, ...]] = {
    "offload": (True, "auto"),
    "param_offload": (False, "auto"),
    "activation_offload": (False, "auto"),
    "optimizer_mode": ("cpu", "auto"),
    "distributed": (False, None),
    "check_memory": (True, False),
    "blocks": (None,),
}


def check_later_options(options: Mapping[str, Any]) -> None:
    """Refuses unknown options, and known ones with values that this version cannot honour."""
    for name, value in options.items():
        if name not in NOT_YET:
            raise ConfigError(f"unknown option {name}={value!r}: allowed are {', '.join(sorted(_known()))}")
        if not any(value is allowed or value == allowed for allowed in NOT_YET[name]):
            allowed = " or ".join(repr(a) for a in NOT_YET[name])
            raise ConfigError(f"{name}={value!r}: not in this version, expected {allowed}")


def _known() -> set[str]:
    ours = {"device", "threads", "pin", "moment_dtype", "master", "guard_params", "max_inflight_bytes", "lr", "verbose"}
    return ours | {"max_grad_norm", "accumulation_steps", "eager", "profile"} | set(NOT_YET)


def check_engine_options(threads: Any, pin: Any, max_inflight_bytes: Any) -> None:
    """Refuses values of the wrong kind."""
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
        raise ConfigError(f"threads={threads!r}: expected a whole number of at least 1, or None")
    if pin not in ("auto", True, False):
        raise ConfigError(f'pin={pin!r}: expected "auto", True or False')
    if not isinstance(max_inflight_bytes, int) or max_inflight_bytes < 0:
        raise ConfigError(f"max_inflight_bytes={max_inflight_bytes!r}: expected a number of bytes of at least 0")


def check_switch(name: str, value: Any) -> None:
    """Refuses what is neither on nor off."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: expected True or False")


def check_max_grad_norm(value: Any, eager: Any) -> None:
    """Refuses what is no norm, and a norm that is not known when an eager update needs it."""
    check_switch("eager", eager)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (number and value > 0):
        raise ConfigError(f"max_grad_norm={value!r}: expected a number above 0, or None")
    if eager and value is not None:
        raise ConfigError(
            f"max_grad_norm={value!r}: expected None with eager=True, which updates before the norm is known"
        )


def check_accumulation_steps(value: Any) -> None:
    """Refuses what is no count."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"accumulation_steps={value!r}: expected a whole number of at least 1")


def moment_dtype(value: Any) -> str:
    """The option in the engine's words."""
    for dtype, names in {
        "float32": ("auto", "float32", torch.float32),
        "bfloat16": ("bfloat16", torch.bfloat16),
    }.items():
        if any(value is name or value == name for name in names):
            return dtype
    raise ConfigError(f'moment_dtype={value!r}: expected "float32", "bfloat16" or "auto"')


def check_master(value: Any, params: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuses an unknown ``master``, and one that would change nothing."""
    if value not in ("float32", "split", "none"):
        raise ConfigError(f'master={value!r}: expected "float32", "split" or "none"')
    if value != "float32" and all(p.dtype != torch.bfloat16 for _, p in params):
        raise ConfigError(f'master={value!r}: no parameter is bfloat16, expected "float32"')


def check_parameter(name: str, p: nn.Parameter) -> None:
    """Refuses a parameter that the engine cannot train."""
    if p.is_meta:
        raise ParameterError(f"parameter {name} is on meta: give it data before wrap()")
    if p.layout != torch.strided:
        raise ParameterError(f"parameter {name} has layout {p.layout}: expected a dense one (torch.strided)")
    if p.dtype not in DTYPES:
        raise ParameterError(f"parameter {name} is {p.dtype}: expected float32, bfloat16 or float16")
    if type(p.data) is not torch.Tensor:
        raise ParameterError(f"parameter {name} is a {type(p.data).__name__}: expected a plain tensor")
    if p.device.type not in ("cpu", "cuda"):
        raise ParameterError(f"parameter {name} is on {p.device}: expected cpu or cuda")
    if not torch.ops.aten.is_non_overlapping_and_dense.default(p):
        raise ParameterError(f"parameter {name} has strides {p.stride()}: expected a dense tensor without overlap")


def check_group(index: int, group: Mapping[str, Any]) -> None:
    """Refuses hyper-parameters out of range, as torch does."""
    beta1, beta2 = group["betas"]
    ranges = {
        "lr": (group["lr"], 0.0, math.inf),
        "eps": (group["eps"], 0.0, math.inf),
        "weight_decay": (group["weight_decay"], 0.0, math.inf),
        "betas[0]": (beta1, 0.0, 1.0),
        "betas[1]": (beta2, 0.0, 1.0),
    }
    for name, (value, low, high) in ranges.items():
        if not low <= float(value) < high:
            raise ConfigError(f"{name}={value!r} of group {index}: expected at least {low} and below {high}")


def one_device(params: Iterable[tuple[str, nn.Parameter]]) -> torch.device:
    """The device that all parameters share."""
    device: torch.device | None = None
    for name, p in params:
        if device is not None and p.device != device:
            raise ParameterError(f"parameter {name} is on {p.device}, others on {device}: expected one device")
        device = p.device
    if device is None:
        raise ParameterError("no parameter requires a gradient: nothing to train")
    return device
