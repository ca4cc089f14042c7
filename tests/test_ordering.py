"""Random delays in copies and updates must not show in the results; leaving out a wait must."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import trainstream
from models import Mlp, adamw, assert_equal, step, twins, weights
from trainstream.bridge import Bridge, inject

SEEDS = range(50)


def run(seed: int | None, reads: bool = True) -> dict[str, torch.Tensor]:
    """Five steps with accumulation, a dropped backward, and reads right after a step."""
    torch.manual_seed(3)
    model: Any = Mlp(17, 2)
    faults = {} if seed is None else {"seed": seed, "max_delay_us": 300, "poison": True}
    with inject(**faults):
        model, optimizer = trainstream.wrap(model, adamw(model.parameters(), lr=1e-2), max_inflight_bytes=1 << 20)
    generator = torch.Generator().manual_seed(1)
    seen = {}
    for i in range(5):
        optimizer.zero_grad()
        model.loss(generator).backward()
        if i == 1:
            optimizer.zero_grad()
            model.loss(generator).backward()
        if i == 2:
            optimizer.zero_grad(set_to_none=False)
            model.loss(generator).backward()
        for _ in range(i % 3):
            (model.loss(generator) / 3).backward()
        optimizer.step()
        if reads:
            seen[f"read {i}"] = model.layers[1].weight.detach().clone()
            seen[f"norm {i}"] = model.head.bias.norm().detach()
    seen.update(weights(model))
    trainstream.unwrap(model)
    return seen


@pytest.fixture(scope="module")
def undelayed() -> dict[str, torch.Tensor]:
    return run(None)


@pytest.mark.parametrize("seed", SEEDS)
def test_delays_do_not_show(seed: int, undelayed: dict[str, torch.Tensor]) -> None:
    """Delayed copies and updates and poisoned memory give the bits of a run without them."""
    assert_equal(run(seed), undelayed)


def differs(expected: dict[str, torch.Tensor]) -> bool:
    """Whether delays show for at least one of a few seeds."""
    for seed in range(5):
        got = run(seed)
        if any(not torch.equal(got[name], w) for name, w in expected.items()):
            return True
    return False


def test_a_missing_wait_for_weights_shows(monkeypatch: pytest.MonkeyPatch, undelayed: dict[str, torch.Tensor]) -> None:
    """The delays have teeth: without Bridge.ready the results change."""
    monkeypatch.setattr(Bridge, "ready", lambda self, slots: None)
    assert differs(undelayed)


def test_gradient_memory_reused_too_early_shows(
    monkeypatch: pytest.MonkeyPatch, undelayed: dict[str, torch.Tensor]
) -> None:
    """The poison has teeth: a gradient's memory given back before it has arrived changes the results."""

    def reap(self: Bridge) -> None:
        for _, grad in self._inflight[-1:]:
            self._engine.retire(grad.data_ptr(), grad.nbytes)

    monkeypatch.setattr(Bridge, "reap", reap)
    assert differs(undelayed)


def test_a_missing_guard_shows(undelayed: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The reads after step() have teeth: without the guard on parameters they see old values."""
    monkeypatch.setattr("trainstream.guard.raise_guard", lambda p: None)
    assert differs(undelayed)


@pytest.mark.parametrize("limit", [0, 1, 1 << 30])
def test_inflight_limit_does_not_show(limit: int, undelayed: dict[str, torch.Tensor]) -> None:
    """How many gradients may be on their way changes no bit."""
    original = trainstream.wrap

    def limited(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "max_inflight_bytes": limit})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainstream, "wrap", limited)
        assert_equal(run(7), undelayed)


def test_dropped_model_outlives_its_updates() -> None:
    """A parameter dies only after the update that was on its way to it, when model and optimizer are dropped."""
    seen: list[torch.Tensor] = []
    with inject(seed=1, max_delay_us=500_000):
        reference, plain, model, ours = twins(Mlp)
    step(reference, plain)
    step(model, ours)
    with torch._C.DisableTorchFunctionSubclass():  # look at the memory without waiting
        memory = model.head.weight.detach()
    death = weakref.ref(model.head.weight, lambda _: seen.append(memory.clone()))
    del model, ours
    gc.collect()
    assert death() is None and len(seen) == 1
    assert (seen[0] - reference.head.weight.detach()).abs().max() <= 3e-7
