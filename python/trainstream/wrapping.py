"""The verbs: ``wrap``, ``unwrap``, ``memory_report``."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from . import checks
from ._engine import ConfigError, ParameterError
from .optimizer import OffloadAdamW
from .profiling import table
from .slots import Slot

_log = logging.getLogger("trainstream")
_wrapped: weakref.WeakKeyDictionary[nn.Module, Wrapped] = weakref.WeakKeyDictionary()


class Wrapped:
    """What :func:`wrap` did to a model, so that it can be undone."""

    def __init__(self, model: nn.Module, optimizer: OffloadAdamW) -> None:
        self.optimizer = optimizer
        self.handles: list[Any] = []
        slots = optimizer._slots
        for module in model.modules():
            own = [slots[p] for p in module.parameters(recurse=False) if p in slots]
            if own:
                self.handles.append(module.register_forward_pre_hook(_EnterHook(optimizer, own), prepend=True))


class _EnterHook:
    """Forward pre-hook of one module. A copied or unpickled model gets one that does nothing."""

    def __init__(self, optimizer: OffloadAdamW | None, slots: list[Slot]) -> None:
        self.optimizer = None if optimizer is None else weakref.ref(optimizer)
        self.slots = slots

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.optimizer is not None and (optimizer := self.optimizer()) is not None:
            optimizer.enter_module(self.slots)

    def __reduce__(self) -> Any:
        return _EnterHook, (None, [])


def wrap(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device: str | torch.device | None = None,
    lr: float | Tensor | None = None,
    threads: int | None = None,
    pin: str | bool = "auto",
    moment_dtype: str | torch.dtype = "auto",
    master: str = "float32",
    max_grad_norm: float | None = None,
    accumulation_steps: int = 1,
    eager: bool = False,
    profile: bool = False,
    guard_params: bool = True,
    max_inflight_bytes: int = 256 << 20,
    verbose: bool = False,
    **later: Any,
) -> tuple[nn.Module, OffloadAdamW]:
    """Moves the optimizer of ``model`` to the host; the training loop stays as it is.

    Args:
        model: any module; its parameters keep their identity.
        optimizer: a ``torch.optim.AdamW`` or ``Adam``, whose groups, hyper-parameters and state are taken
            over; ``None`` makes AdamW over all parameters.
        device: where the weights live, ``"cuda"``, ``"cuda:N"`` or ``"cpu"``; ``None`` leaves them where
            they are. On ``"cpu"`` everything works the same, for machines without a GPU.
        lr: learning rate when ``optimizer`` is ``None``.
        threads, pin, moment_dtype, master, max_grad_norm, eager, accumulation_steps, profile, guard_params,
            max_inflight_bytes: see :class:`OffloadAdamW`.
        verbose: log one line about what was done.
        later: options of later versions, accepted with the values that mean "as today".

    Returns:
        The same model, and the optimizer to use from now on.

    Raises:
        ConfigError, ParameterError, DeviceError, PinError, MemoryError: before anything is changed.
    """
    checks.check_later_options(later)
    checks.check_engine_options(threads, pin, max_inflight_bytes)
    checks.moment_dtype(moment_dtype)
    checks.check_switch("profile", profile)
    checks.check_max_grad_norm(max_grad_norm, eager)
    checks.check_accumulation_steps(accumulation_steps)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={type(model).__name__}: expected a torch.nn.Module")
    if model in _wrapped:
        raise ConfigError("the model is wrapped already: unwrap() it first")
    if lr is not None and optimizer is not None:
        raise ConfigError(f"lr={lr!r}: expected only without an optimizer; set it in the optimizer's groups")
    optimizer = _checked(model, optimizer, 1e-3 if lr is None else lr)
    groups, defaults = _settings(optimizer)
    names = {p: name for name, p in model.named_parameters()}
    trained = [(names.get(p, "of the optimizer"), p) for g in groups for p in g["params"] if p.requires_grad]
    for i, group in enumerate(groups):
        checks.check_group(i, group)
    for name, p in trained:
        checks.check_parameter(name, p)
    checks.check_master(master, trained)
    here = checks.one_device(trained)
    target = _target(device, here)
    ours = None
    try:
        if target != here:
            model.to(target)
        ours = OffloadAdamW(
            groups,
            **defaults,
            names=names,
            threads=threads,
            pin=pin,
            moment_dtype=moment_dtype,
            master=master,
            max_grad_norm=max_grad_norm,
            eager=eager,
            accumulation_steps=accumulation_steps,
            profile=profile,
            guard_params=guard_params,
            max_inflight_bytes=max_inflight_bytes,
        )
        if optimizer.state:
            ours.load_state_dict(optimizer.state_dict())
    except BaseException:  # memory, pinning or the state were refused: the model is as it was
        if ours is not None:
            ours.detach()
        if target != here:
            model.to(here)
        raise
    _wrapped[model] = Wrapped(model, ours)
    if refusal := ours.engine.report()["pin_refusal"]:
        _log.warning("%s; copies are slower from here on", refusal)
    if verbose:
        count = sum(p.numel() for _, p in trained)
        _log.info("%d parameters on %s, their optimizer state on the host", count, target)
    return model, ours


def _target(device: str | torch.device | None, here: torch.device) -> torch.device:
    if device is None:
        return here
    try:
        target = torch.device(device)
    except RuntimeError as e:
        raise ConfigError(f"device={device!r}: expected cpu, cuda or cuda:N") from e
    if target.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r}: expected cpu, cuda or cuda:N")
    if str(target) == "cuda":  # without an index
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
        target = torch.device("cuda", index)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}: torch sees no CUDA device, expected cpu")
    return target


def _checked(model: nn.Module, optimizer: torch.optim.Optimizer | None, lr: float | Tensor) -> torch.optim.Optimizer:
    """The optimizer to be replaced, of a kind that can be."""
    if optimizer is None:
        if not any(p.requires_grad for p in model.parameters()):
            raise ParameterError("no parameter requires a gradient: nothing to train")
        return torch.optim.AdamW(model.parameters(), lr=lr)
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        raise ConfigError(f"optimizer={type(optimizer).__name__}: expected torch.optim.AdamW or torch.optim.Adam")
    return optimizer


def _settings(optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Groups and defaults of the optimizer, for :class:`OffloadAdamW`."""
    decoupled = type(optimizer) is torch.optim.AdamW or bool(optimizer.defaults.get("decoupled_weight_decay"))
    dropped = ("foreach", "fused", "capturable", "differentiable")  # kinds of torch's own kernels
    groups = [{k: v for k, v in group.items() if k not in dropped} for group in optimizer.param_groups]
    for group in groups:
        group["params"] = list(group["params"])
        group["decoupled_weight_decay"] = decoupled
    kept = ("lr", "betas", "eps", "weight_decay", "maximize", "amsgrad")
    return groups, {"decoupled": decoupled, **{k: optimizer.defaults[k] for k in kept}}


def unwrap(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Ends offloading and gives the model back, with a torch optimizer that continues from the same state.

    Returns:
        The model, and a ``torch.optim.AdamW`` (or ``Adam``) over the same groups.

    Raises:
        ConfigError: the model is not wrapped.
    """
    ours = _find(model)
    state = ours.optimizer.state_dict()
    groups = [{**g, "params": list(g["params"])} for g in ours.optimizer.param_groups]
    decoupled = bool(groups[0].get("decoupled_weight_decay", True))
    for handle in ours.handles:
        handle.remove()
    del _wrapped[model]
    ours.optimizer.detach()
    for entry in state["state"].values():
        entry.pop("master", None)
    plain: torch.optim.Optimizer
    plain = torch.optim.AdamW(groups) if decoupled else torch.optim.Adam(groups)
    plain.load_state_dict(state)
    return model, plain


def report(model: nn.Module) -> str:
    """Where the bytes of a wrapped model are and, after some steps with ``profile=True``, where their time went.

    Raises:
        ConfigError: the model is not wrapped.
    """
    figures = memory_report(model)
    optimizer = _find(model).optimizer
    lines = [f"{figures['params']:,} parameters on {figures['device']}, {figures['threads']} threads"]
    lines += [f"  {key:<56}{value / 2**20:>10.2f} MiB" for key, value in figures.items() if key.endswith("_bytes")]
    return "\n".join([*lines, "", table(optimizer.engine.spans())])


def memory_report(model: nn.Module) -> dict[str, Any]:
    """Where each byte of a wrapped model lives, and where the time went.

    Returns:
        ``device``; ``params`` (trained); bytes: ``device_weight_bytes`` (trained and frozen),
        ``host_master_bytes``, ``host_moment_bytes``, ``host_gradient_bytes``, ``host_staging_bytes``,
        ``pinned_bytes``, ``pageable_bytes``; ``bytes_out`` and ``bytes_in`` over the bus since ``wrap``;
        ``seconds``: ``update`` (host arithmetic), ``accumulate`` (gradients added up and their norm taken),
        ``wait_gradients`` (worker waiting for copies), ``wait_update`` (training waiting for updates); ``steps``,
        ``skipped_steps``, ``grad_norm`` (the last one taken), ``threads``, ``cpu``, ``events``.
    """
    optimizer = _find(model).optimizer
    report = optimizer.engine.report()
    refusal = report.pop("pin_refusal")
    return {
        "device": str(optimizer.engine.device),
        "params": sum(slot.param.numel() for slot in optimizer._slots.values()),
        "device_weight_bytes": sum(p.nbytes for p in model.parameters()),
        **report,
        "events": [refusal] if refusal else [],
    }


def _find(model: nn.Module) -> Wrapped:
    try:
        return _wrapped[model]
    except (KeyError, TypeError):
        raise ConfigError(f"{type(model).__name__} is not wrapped: call trainstream.wrap() first") from None
