"""The only file that reads ``data_ptr()`` or a stream handle: torch tensors in, engine calls out."""

from __future__ import annotations

import atexit
import contextlib
import math
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from . import _engine

_faults: ContextVar[dict[str, Any] | None] = ContextVar("trainstream_faults", default=None)
_open: weakref.WeakSet[Bridge] = weakref.WeakSet()


@contextlib.contextmanager
def inject(**faults: Any) -> Iterator[None]:
    """Engines built inside use a host device with these faults (``seed``, ``max_delay_us``, ``poison``,
    ``fail_copy``, ``pin_limit``, ``panic_job``). For tests."""
    token = _faults.set(faults)
    try:
        yield
    finally:
        _faults.reset(token)


class Bridge:
    """One engine, spoken to in tensors.

    Args:
        device: where the weights live, ``cpu`` (the host device) or ``cuda:N``.
        threads: update threads; ``None`` takes this rank's share of the CPUs.
        pin: ``"auto"``, ``True`` or ``False``.
        max_inflight_bytes: device memory that leaving gradients may hold before the caller waits.
    """

    def __init__(self, device: torch.device, threads: int | None, pin: str | bool, max_inflight_bytes: int) -> None:
        self.device = device
        self._engine = _engine.Engine(str(device), threads, str(pin), _faults.get() or None)
        self._max_inflight_bytes = max_inflight_bytes
        self._inflight: list[tuple[_engine.Transfer, Tensor]] = []
        self._weights: list[Tensor] = []  # uploads write to them: they must outlive the engine
        _open.add(self)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0

    def add_slots(
        self, params: Sequence[tuple[Tensor, bool, int]], *, master: str, moment_dtype: str
    ) -> list[tuple[int, bool]]:
        """Host state for ``(parameter, amsgrad, key of its random bits)``, as slot numbers and whether they have a
        master."""
        specs = [(p.numel(), dtype_name(p.dtype), master, moment_dtype, ams, key) for p, ams, key in params]
        numbers = self._engine.add_slots(specs)
        self._weights.extend(p for p, _, _ in params)
        return [(number, self._engine.has_master(number)) for number in numbers]

    def load_weight(self, slot: int, weight: Tensor) -> None:
        """Master := weight (waits)."""
        self._engine.load_weight(slot, weight.data_ptr(), weight.nbytes, self._stream())

    def merge_weight(self, slot: int, weight: Tensor) -> None:
        """Master := weight where that is no rounding of the master (waits)."""
        self._engine.merge_weight(slot, weight.data_ptr(), weight.nbytes, self._stream())

    def push_gradient(self, slot: int, grad: Tensor, like: Tensor, *, add: bool) -> None:
        """Starts a gradient's way to the host, with strides and dtype of ``like``, and keeps its memory until it has
        arrived."""
        if (grad.stride(), grad.dtype, grad.device) != (like.stride(), like.dtype, self.device):
            grad = torch.empty_like(like, device=self.device).copy_(grad)
        transfer = self._engine.push_gradient(slot, grad.data_ptr(), grad.nbytes, self._stream(), add)
        self._inflight.append((transfer, grad))
        self.reap()

    def reap(self) -> None:
        """Lets go of gradients that have arrived; waits while too many are on their way."""
        held = sum(grad.nbytes for _, grad in self._inflight)
        while self._inflight and (held > self._max_inflight_bytes or self._inflight[0][0].done()):
            transfer, grad = self._inflight.pop(0)
            held -= grad.nbytes
            self._engine.settle(transfer)
            if self.device.type == "cpu":
                self._engine.retire(grad.data_ptr(), grad.nbytes)

    def update(
        self,
        weights: Sequence[tuple[int, Tensor, int, float]],
        hypers: Sequence[_engine._Hyper],
        max_norm: float | None = None,
    ) -> None:
        """Queues updates of ``(slot, weight, index into hypers, factor of the gradient)`` in this order and returns at
        once.

        With ``max_norm`` gradients are clipped to that global norm, and nothing is updated if it is not finite.
        """
        updates = [(slot, w.data_ptr(), w.nbytes, group, scale) for slot, w, group, scale in weights]
        self._engine.update(updates, list(hypers), max_norm, self._stream())

    def ready(self, slots: Sequence[int]) -> None:
        """The current stream sees the last update of these slots."""
        self._engine.ready(list(slots), self._stream())

    def drain(self) -> None:
        """Waits until all gradients have arrived and all updates are done."""
        for transfer, _ in self._inflight:
            self._engine.settle(transfer)
        self.reap()
        self._engine.drain()

    def array(self, slot: int, which: str, like: Tensor) -> Tensor:
        """A copy of ``master`` or a moment, under torch's name: fp32 on the CPU, shaped like ``like``."""
        out = _host_like(like)
        self._engine.read_array(slot, which, out.data_ptr(), out.numel())
        return out

    def set_array(self, slot: int, which: str, value: Tensor, like: Tensor) -> None:
        """Replaces ``master`` or a moment."""
        value = _host_like(like).copy_(value)
        self._engine.write_array(slot, which, value.data_ptr(), value.numel())

    def gradient(self, slot: int, like: Tensor) -> Tensor:
        """A copy of the gradient on the device, in the dtype of ``like``."""
        out = _host_like(like)
        self._engine.read_gradient(slot, out.data_ptr(), out.numel())
        return out.to(self.device, like.dtype)

    def relayout_gradient(self, slot: int, old: Tensor, new: Tensor) -> None:
        """Gives the gradient the strides of ``new``; its sum stays fp32."""
        value = _host_like(old)
        self._engine.read_gradient(slot, value.data_ptr(), value.numel())
        self.set_gradient(slot, value, new)

    def set_gradient(self, slot: int, value: Tensor, like: Tensor) -> None:
        """Replaces the gradient."""
        value = _host_like(like).copy_(value)
        self._engine.write_gradient(slot, value.data_ptr(), value.numel())

    def step(self, slot: int) -> int:
        """Updates done on a slot."""
        return self._engine.step(slot)

    def set_step(self, slot: int, step: int) -> None:
        """Sets the number of updates done on a slot."""
        self._engine.set_step(slot, step)

    def check(self) -> None:
        """Raises what stopped the engine, if anything did."""
        self._engine.check()

    def norm(self, slot: int) -> float:
        """2-norm of a slot's gradient."""
        self._engine.drain()
        return math.sqrt(self._engine.squares(slot))

    def skipped_steps(self) -> int:
        """Updates that a norm forbade so far."""
        return self._engine.skipped_steps()

    def count_step(self) -> None:
        """Counts a step that updated something."""
        self._engine.count_step()

    def start_trace(self) -> None:
        """Starts recording spans."""
        self._engine.start_trace()

    def add_span(self, name: str, seconds: float) -> None:
        """Records a span of this thread that began ``seconds`` ago."""
        self._engine.add_span(name, seconds)

    def spans(self) -> list[tuple[str, str, float, float]]:
        """All spans: name, lane, start and end in seconds."""
        return self._engine.spans()

    def report(self) -> dict[str, Any]:
        """Bytes, seconds and counts."""
        return self._engine.report()

    def close(self) -> None:
        """Finishes what is queued and stops the threads. May be called twice."""
        with contextlib.suppress(_engine.TrainStreamError):
            self.drain()
        self._engine.close()
        self._inflight.clear()
        self._weights.clear()


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def address(tensor: Tensor) -> int:
    """Where a parameter's data lies, to notice that it was replaced."""
    return tensor.data_ptr()


def _host_like(like: Tensor) -> Tensor:
    # Keeps the strides, so that element i of the flat state is element i of the weight.
    return torch.empty_like(like, dtype=torch.float32, device="cpu")


@atexit.register
def _close_all() -> None:
    # Before the interpreter and the driver go: worker threads must be gone by then.
    for bridge in list(_open):
        with contextlib.suppress(Exception):
            bridge.close()
