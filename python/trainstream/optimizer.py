"""``OffloadAdamW``: a torch optimizer whose state and arithmetic are on the host."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from . import checks, guard, hooks
from ._engine import ConfigError
from .bridge import Bridge
from .profiling import Phases, write_chrome_trace
from .slots import Slot

_log = logging.getLogger("trainstream")


class OffloadAdamW(torch.optim.Optimizer):
    """AdamW (or Adam) with master weights and moments in host memory.

    Gradients leave the device while backward runs; :meth:`step` queues the updates on host threads and
    returns at once; whoever reads a weight next waits for its update. Arithmetic follows
    :class:`torch.optim.AdamW`: the largest difference after 20 fp32 steps is 3e-7 of the weight scale.

    Args:
        params: parameters or groups, float32, bfloat16 or float16, dense, all on one device. Frozen ones
            are kept in their groups and left alone.
        lr, betas, eps, weight_decay, maximize: as in :class:`torch.optim.AdamW`; read at each ``step()``.
        amsgrad: as in :class:`torch.optim.AdamW`; cannot change once a parameter has state.
        decoupled: AdamW's decay; ``False`` is Adam with L2 in the gradient.
        moment_dtype: ``"float32"`` (also ``"auto"``), or ``"bfloat16"`` with stochastic rounding: 4 bytes per
            parameter less. Names or torch dtypes.
        master: how bfloat16 weights keep their fp32 master; others have it always. ``"float32"``: whole, 4 bytes
            beside the 2 of the weight. ``"split"``: two 16-bit halves of which one is the weight, 2 bytes beside it,
            the same values (halfway cases round away from zero, not to even). ``"none"``: no master, weights are
            rounded stochastically.
        max_grad_norm: clips the gradients' global 2-norm at each ``step()``, as torch's ``clip_grad_norm_`` does,
            without waiting for it; ``p.grad`` stays as it is. A step whose norm is not finite changes nothing and
            counts in ``stats()["skipped_steps"]``; ``math.inf`` does only that. Without it, as in torch, NaN
            gradients make NaN weights.
        eager: updates each parameter as soon as backward has its gradient, ``accumulation_steps`` of them, so that the
            update hides behind the rest of backward. Weights then change before ``step()``, with the learning rate
            of that moment; later edits of ``p.grad`` (clipping, a GradScaler) have no effect, and one more backward
            before ``step()`` raises. Not with ``max_grad_norm``.
        accumulation_steps: backwards per ``step()``; only ``eager`` has to know.
        profile: records what happens when, for :meth:`export_chrome_trace` and :func:`trainstream.report`.
        names: names of parameters for messages; numbers otherwise.
        threads: update threads; ``None`` is this rank's share of the CPUs it may use.
        pin: ``"auto"`` page-locks host memory and falls back, with a warning in the report, where the
            driver refuses; ``True`` raises there; ``False`` never pins.
        guard_params: reads of a weight outside its module wait for its update.
        max_inflight_bytes: device memory that leaving gradients may hold before backward waits.

    Raises:
        ConfigError: an option or hyper-parameter is out of range.
        ParameterError: a parameter cannot be trained, or there is none.
        DeviceError: the device is absent; :class:`PinError` under ``pin=True``.
        MemoryError: host memory is refused.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        amsgrad: bool = False,
        decoupled: bool = True,
        moment_dtype: str | torch.dtype = "auto",
        master: str = "float32",
        max_grad_norm: float | None = None,
        eager: bool = False,
        accumulation_steps: int = 1,
        profile: bool = False,
        names: Mapping[nn.Parameter, str] | None = None,
        threads: int | None = None,
        pin: str | bool = "auto",
        guard_params: bool = True,
        max_inflight_bytes: int = 256 << 20,
    ) -> None:
        checks.check_engine_options(threads, pin, max_inflight_bytes)
        checks.check_switch("profile", profile)
        checks.check_max_grad_norm(max_grad_norm, eager)
        checks.check_accumulation_steps(accumulation_steps)
        self._eager, self._accumulation_steps = eager, accumulation_steps
        self._bridge: Bridge | None = None
        self.max_grad_norm = max_grad_norm
        self._master, self._moment_dtype = master, checks.moment_dtype(moment_dtype)
        self._slots: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._names = WeakIdKeyDictionary(dict(names or {}))
        self._guard_params, self._ranked, self._skipped = guard_params, 0, 0
        self._stats = {"guard_waits": 0}
        self._handles: list[Any] = []
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize, amsgrad=amsgrad)
        super().__init__(params, {**defaults, "decoupled_weight_decay": decoupled})
        for i, group in enumerate(self.param_groups):
            checks.check_group(i, group)
        trained = self._trained(self.param_groups)
        for name, p in trained:
            checks.check_parameter(name, p)
        checks.check_master(master, trained)
        self._bridge = Bridge(checks.one_device(trained), threads, pin, max_inflight_bytes)
        weakref.finalize(self, self._bridge.close).atexit = False  # the bridge sees to that itself
        self._phases = Phases(self._bridge) if profile else None
        if profile:
            self._bridge.start_trace()
        try:
            self._adopt(trained)
        except BaseException:
            self._bridge.close()
            raise

    # ------------------------------------------------------------------ parameters
    @property
    def engine(self) -> Bridge:
        """The engine, in tensors."""
        assert self._bridge is not None
        return self._bridge

    def _name(self, p: nn.Parameter, group: int, index: int) -> str:
        return self._names.get(p) or f"{index} of group {group}"

    def _trained(self, groups: Iterable[Mapping[str, Any]]) -> list[tuple[str, nn.Parameter]]:
        return [
            (self._name(p, g, i), p)
            for g, group in enumerate(groups)
            for i, p in enumerate(group["params"])
            if p.requires_grad and p not in self._slots
        ]

    def _adopt(self, params: list[tuple[str, nn.Parameter]]) -> None:
        groups = [g for g, group in enumerate(self.param_groups) for _ in group["params"]]
        amsgrad = [bool(self.param_groups[g]["amsgrad"]) for g in groups]
        # A parameter's place in the state dict: the same when training is resumed.
        places = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        numbers = self.engine.add_slots(
            [(p, amsgrad[places[p]], places[p]) for _, p in params],
            master=self._master,
            moment_dtype=self._moment_dtype,
        )
        # All weights first: a copy that fails leaves no hook behind.
        slots = [
            Slot(self.engine, number, name, p, groups[places[p]], amsgrad=amsgrad[places[p]], master=has_master)
            for (number, has_master), (name, p) in zip(numbers, params, strict=True)
        ]
        for slot in slots:
            self._slots[slot.param] = slot
            self._handles.append(slot.param.register_post_accumulate_grad_hook(hooks.gradient_hook(self, slot)))
            guard.watch(slot.param, hooks.waiter(self, slot))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; parameters of the group get host state at once."""
        super().add_param_group(param_group)
        if self._bridge is None:
            return
        try:
            checks.check_group(len(self.param_groups) - 1, self.param_groups[-1])
            trained = self._trained(self.param_groups)
            for name, p in trained:
                checks.check_parameter(name, p)
            self._adopt(trained)
        except BaseException:
            self.param_groups.pop()
            raise

    # ------------------------------------------------------------------ waiting
    def wait_for(self, slots: Iterable[Slot]) -> None:
        """The current stream sees the updates of these slots."""
        pending = [slot for slot in slots if slot.pending]
        if pending:
            self.engine.ready([slot.number for slot in pending])
            for slot in pending:
                slot.settled()

    def enter_module(self, slots: list[Slot]) -> None:
        """Called before a module's forward: waits for its weights, and learns the order of use."""
        for slot in slots:
            if slot.rank is None:
                slot.rank, self._ranked = self._ranked, self._ranked + 1
        self.wait_for(slots)

    def _guard_wait(self, slot: Slot) -> None:
        self._stats["guard_waits"] += 1
        self.wait_for([slot])

    def synchronize(self) -> None:
        """Waits until all gradients have arrived and all updates are done, and raises what went wrong."""
        self.engine.drain()
        self.wait_for(self._slots.values())

    # ------------------------------------------------------------------ step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Queues one update of every parameter that has a gradient, and returns at once.

        Returns:
            What ``closure`` returned, if one was given.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.engine.check()
        self._enter("step")
        with torch.no_grad():
            self._step()
        self._enter("forward")
        return loss

    def arrived(self, slot: Slot) -> None:
        """Called when backward has a gradient: sends it away."""
        self._enter("backward")
        slot.take_gradient()
        slot.backwards += 1
        if not self._eager or slot.backwards < self._accumulation_steps:
            return
        if slot.early:
            raise ConfigError(
                f"eager=True, accumulation_steps={self._accumulation_steps}: {slot.name} got one more gradient before "
                "step(); expected accumulation_steps to be the number of backwards per step()"
            )
        group = self.param_groups[slot.group]
        checks.check_group(slot.group, group)
        slot.check_amsgrad(slot.group, group["amsgrad"])
        with torch.no_grad():
            self.wait_for([slot])
            slot.adopt_changes()
            self.engine.update([(slot.number, slot.param, 0, slot.scale)], [_hyper(group)])
            slot.updated(self._guard_params)
        slot.early = True

    def _enter(self, phase: str) -> None:
        if self._phases is not None:
            self._phases.enter(phase, time.perf_counter())

    def export_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes what was recorded with ``profile=True``, for https://ui.perfetto.dev or ``chrome://tracing``.

        Raises:
            ConfigError: without ``profile=True``.
        """
        if self._phases is None:
            raise ConfigError("profile=False: expected True, nothing was recorded")
        self.engine.drain()
        write_chrome_trace(self.engine.spans(), path)

    def _step(self) -> None:
        late = [(name, p) for name, p in self._trained(self.param_groups) if p.grad is not None]
        for name, p in late:  # unfrozen after wrap
            checks.check_parameter(name, p)
        checks.check_max_grad_norm(self.max_grad_norm, self._eager)
        self._adopt(late)
        work: list[tuple[Slot, int]] = []
        hypers = []
        for g, group in enumerate(self.param_groups):
            checks.check_group(g, group)
            hypers.append(_hyper(group))
            for p in group["params"]:
                if p.grad is not None and p in self._slots and not self._slots[p].early:
                    self._slots[p].check_amsgrad(g, group["amsgrad"])
                    work.append((self._slots[p], g))
        self.wait_for(slot for slot, _ in work)
        for slot, _ in work:
            slot.adopt_changes()
            slot.take_gradient()
        # In the order of the next forward, so that it can start while later updates still run.
        work.sort(key=lambda item: (item[0].rank is None, item[0].rank))
        self._tell_skipped()
        self.engine.reap()
        self.engine.update([(slot.number, slot.param, g, slot.scale) for slot, g in work], hypers, self.max_grad_norm)
        for slot, _ in work:
            slot.updated(self._guard_params)
        early = [slot for slot in self._slots.values() if slot.early]
        for slot in [*early, *(slot for slot, _ in work)]:
            slot.early, slot.backwards = False, 0
        if work or early:
            self.engine.count_step()

    def _tell_skipped(self) -> None:
        if (skipped := self.engine.skipped_steps()) > self._skipped:
            _log.warning("%d of the steps so far skipped: the gradient norm was not finite", skipped)
            self._skipped = skipped

    @property
    def last_grad_norm(self) -> float | None:
        """Global 2-norm of the gradients at the last ``step()`` with ``max_grad_norm``, before clipping. Waits."""
        self.engine.drain()
        norm: float | None = self.engine.report()["grad_norm"]
        return norm

    # ------------------------------------------------------------------ state
    def state_dict(self) -> dict[str, Any]:
        """torch's AdamW state dict, with ``master`` beside the moments where there is one. Tensors are fp32 copies on
        the CPU."""
        if self._healthy():
            self.engine.drain()
        try:
            for p, slot in self._slots.items():
                if state := slot.state():
                    self.state[p] = state
            return super().state_dict()
        finally:
            self.state.clear()

    def _healthy(self) -> bool:
        # After a failure the state can still be read and saved.
        try:
            self.engine.check()
        except RuntimeError:
            return False
        return True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state dict of this class or of :class:`torch.optim.AdamW`; all or nothing.

        Raises:
            ValueError: groups do not match (torch's check).
            ParameterError: a state lacks an entry or has the wrong shape, named by parameter.
        """
        self.synchronize()
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        ours = [p for group in self.param_groups for p in group["params"]]
        loads = []
        if len(saved) == len(ours):  # else torch's loader says what differs
            for i, p in zip(saved, ours, strict=True):
                state = state_dict["state"].get(i, {})
                if p in self._slots:
                    self._slots[p].check_state(state)
                    loads.append((self._slots[p], state))
                elif state and p.requires_grad:
                    raise ConfigError(f"parameter {i} of the state dict has no host state here")
        for i, (group, own) in enumerate(zip(state_dict["param_groups"], self.param_groups, strict=False)):
            settings = {**own, **group}
            checks.check_group(i, settings)
            for p in own["params"]:
                if p in self._slots:
                    self._slots[p].check_amsgrad(i, settings["amsgrad"])
        before = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for group, settings in zip(self.param_groups, before, strict=True):
            for key, value in settings.items():
                group.setdefault(key, value)
        for slot, state in loads:
            slot.load_state(state)

    def stats(self) -> dict[str, Any]:
        """Counters and bytes of the engine; see :func:`trainstream.memory_report`."""
        report = self.engine.report()
        state_bytes = report["host_master_bytes"] + report["host_moment_bytes"]
        return {"mode": "cpu", "host_state_bytes": state_bytes, **self._stats, **report}

    def detach(self) -> None:
        """Ends offloading: weights are final, gradients are plain tensors again, threads are gone."""
        try:
            self.synchronize()
            for p, slot in self._slots.items():
                if p.grad is not None and p.grad is slot.grad:
                    p.grad = slot.grad.materialize()
        finally:
            for handle in self._handles:
                handle.remove()
            for slot in self._slots.values():
                slot.settled()
            self._slots.clear()
            self.engine.close()


def _hyper(group: Mapping[str, Any]) -> tuple[float, float, float, float, float, bool, bool]:
    beta1, beta2 = group["betas"]
    return (
        float(group["lr"]),
        float(beta1),
        float(beta2),
        float(group["eps"]),
        float(group["weight_decay"]),
        bool(group.get("decoupled_weight_decay", True)),
        bool(group["maximize"]),
    )
