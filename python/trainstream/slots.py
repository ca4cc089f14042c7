"""One trained parameter and its host state, seen from Python."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import checks, guard
from ._engine import ConfigError, DeviceError, ParameterError
from .bridge import Bridge, address
from .grads import StreamedGrad


class Slot:
    """Ties a parameter to its engine slot.

    Attributes:
        scale: what the gradient on the host has to be multiplied by.
        group: index of its parameter group.
        grad: the live gradient; ``p.grad`` counts only while it is this very object.
        pending: an update was queued that the compute stream may not see yet.
        backwards: how many the gradient is the sum of.
        early: whether this step's update was queued already, during backward.
        rank: position in the first forward; updates run in that order.
        amsgrad: whether ``max_exp_avg_sq`` is among its moments.
    """

    def __init__(
        self, bridge: Bridge, number: int, name: str, param: nn.Parameter, group: int, *, amsgrad: bool, master: bool
    ) -> None:
        self._bridge, self.number, self.name, self.param, self.group = bridge, number, name, param, group
        self._form, self.amsgrad = _form(param), amsgrad
        self._moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if amsgrad else ("exp_avg", "exp_avg_sq")
        self._arrays = (*self._moments, "master") if master else self._moments
        self.grad: StreamedGrad | None = None
        self.scale = 1.0
        self.pending = self.early = False
        self.backwards = 0
        self.rank: int | None = None
        bridge.load_weight(number, param)
        self._saw_weight()

    def _saw_weight(self) -> None:
        self._version, self._address = self.param._version, address(self.param)

    def push_gradient(self, grad: Tensor, *, add: bool) -> None:
        """Sends a gradient to the host, as a new one or to be added."""
        if add and self.scale != 1:
            self.write_gradient(self.read_gradient())
        self.scale = 1.0
        self._bridge.push_gradient(self.number, grad, self._form, add=add)

    def take_gradient(self) -> None:
        """If ``p.grad`` is a plain tensor, sends it to the host and leaves a :class:`StreamedGrad`."""
        grad = self.param.grad
        if grad is None or grad is self.grad:
            return
        if isinstance(grad, StreamedGrad):
            grad = grad.materialize()
        self.backwards = 0
        if grad.layout != torch.strided:
            raise ParameterError(
                f"gradient of {self.name} has layout {grad.layout}: only dense gradients can be trained "
                "(for nn.Embedding, use sparse=False)"
            )
        self.push_gradient(grad, add=False)
        self.grad = StreamedGrad(self)
        self.param.grad = self.grad

    def read_gradient(self) -> Tensor:
        """The gradient on the parameter's device."""
        grad = self._bridge.gradient(self.number, self._form).to(self.param.device)
        return grad if self.scale == 1 else grad.mul_(self.scale)

    def write_gradient(self, value: Tensor) -> None:
        """Replaces the gradient."""
        self._bridge.set_gradient(self.number, value, self._form)
        self.scale = 1.0

    def gradient_norm(self) -> float:
        """2-norm of the gradient, taken on the host."""
        return abs(self.scale) * self._bridge.norm(self.number)

    def adopt_changes(self) -> None:
        """Takes over what somebody else wrote to the weight since our last update.

        Where the weight still is the rounding of the master, the master keeps its precision.
        """
        p = self.param
        if p.device != self._bridge.device:
            raise DeviceError(
                f"parameter {self.name} is on {p.device}, its state belongs to {self._bridge.device}: "
                "it was moved off the GPU after wrap()"
            )
        if (p.dtype, p.shape) != (self._form.dtype, self._form.shape):
            raise ParameterError(
                f"parameter {self.name} was {self._form.dtype} {tuple(self._form.shape)} at wrap() and is {p.dtype} "
                f"{tuple(p.shape)} now: wrap again"
            )
        if p.stride() != self._form.stride():
            self._rearrange()
        if (p._version, address(p)) == (self._version, self._address):
            return
        self._bridge.merge_weight(self.number, p)
        self._saw_weight()

    def _rearrange(self) -> None:
        # The weight has other strides now (as after .to(memory_format=...)): the flat state follows it.
        checks.check_parameter(self.name, self.param)
        old, self._form = self._form, _form(self.param)
        for name in self._arrays:
            self._bridge.set_array(self.number, name, self._bridge.array(self.number, name, old), self._form)
        if self.param.grad is not None and self.param.grad is self.grad:
            self._bridge.relayout_gradient(self.number, old, self._form)
        self._version = -1  # a weight without master comes from the device, even if nothing else changed

    def updated(self, guarded: bool) -> None:
        """Notes that an update is on its way to the weight."""
        torch.autograd.graph.increment_version(self.param)
        self._saw_weight()
        self.pending = True
        if guarded:
            guard.raise_guard(self.param)

    def settled(self) -> None:
        """Notes that the compute stream sees the update."""
        self.pending = False
        guard.lower_guard(self.param)

    def check_amsgrad(self, group: int, amsgrad: bool) -> None:
        """Raises if the group's ``amsgrad`` is not the one that the state was made for."""
        if bool(amsgrad) != self.amsgrad:
            raise ConfigError(
                f"amsgrad={amsgrad!r} of group {group}: the state of {self.name} was made with amsgrad={self.amsgrad}, "
                "and that cannot change"
            )

    def state(self) -> dict[str, Any]:
        """torch's AdamW state of this parameter, plus ``master`` if it has one, all fp32; empty before the first
        update."""
        step = self._bridge.step(self.number)
        if step == 0:
            return {}
        arrays = {name: self._bridge.array(self.number, name, self._form) for name in self._arrays}
        return {"step": torch.tensor(float(step)), **arrays}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raises if :meth:`load_state` could not take ``state``."""
        if not state:
            return
        for key in ("step", *self._moments):
            if key not in state:
                raise ParameterError(f"state of {self.name} has no {key!r}")
        step = state["step"]
        try:
            valid = float(step) >= 0 and float(step).is_integer()
        except (TypeError, ValueError, RuntimeError):
            valid = False
        if not valid:
            raise ParameterError(f"state of {self.name}: step is {step!r}, expected a whole number of at least 0")
        for key in self._arrays:
            value = state.get(key)
            if value is not None and (not isinstance(value, Tensor) or value.shape != self._form.shape):
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ParameterError(f"state of {self.name}: {key} is {got}, expected {tuple(self._form.shape)}")

    def load_state(self, state: dict[str, Any]) -> None:
        """Replaces the state by torch's; an empty one means never updated."""
        for key in self._moments:
            self._bridge.set_array(self.number, key, state.get(key, torch.zeros(())), self._form)
        self._bridge.set_step(self.number, int(state.get("step", 0)))
        if self._form.dtype != torch.float32 and "master" in self._arrays and "master" in state:
            self._bridge.set_array(self.number, "master", state["master"], self._form)
            self._version = -1  # the weights may be loaded before or after: reconcile at the next step


def _form(p: Tensor) -> Tensor:
    """Shape, strides and dtype, without data."""
    with torch._C.DisableTorchFunctionSubclass():  # a guarded parameter need not be waited for
        return torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
