"""Clipping by the global norm inside step(), and steps that a norm forbids."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import nn

import trainstream
from models import TOLERANCE, Gpt, Mlp, Strides, adamw, assert_close, assert_equal, assert_moved, step, twins, weights
from trainstream.bridge import inject


def clipped(params: Any, max_norm: float) -> float:
    return float(torch.nn.utils.clip_grad_norm_(params, max_norm, foreach=False))


@pytest.mark.parametrize("max_norm", [1e-3, 0.3, 1e4])
@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("build", [Mlp, Strides])
def test_clipping_is_torchs(build: Any, backwards: int, max_norm: float, device: str) -> None:
    """Ten steps follow clip_grad_norm_ and AdamW, for norms below and above the limit; the norm is torch's."""
    reference, plain, model, ours = twins(
        build, device, lambda m: adamw(m.parameters(), eps=1e-6), max_grad_norm=max_norm, accumulation_steps=backwards
    )
    start = weights(model)
    for i in range(10):
        generator = torch.Generator().manual_seed(i)
        ours.zero_grad()
        for _ in range(backwards):
            loss = model.loss(generator)
            grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            loss.backward()
            for p, grad in zip(reference.parameters(), grads, strict=True):
                p.grad = grad.clone() if p.grad is None else p.grad + grad
        norm = clipped(reference.parameters(), max_norm)
        plain.step()
        plain.zero_grad()
        ours.step()
        assert ours.last_grad_norm == pytest.approx(norm, rel=1e-6)
    assert_close(model, reference, TOLERANCE)
    assert_moved(model, start)


def test_norm_of_16_bit_gradients(device: str) -> None:
    """The norm of bf16 gradients is exact where torch's is a bf16 number."""
    weight = nn.Parameter(torch.zeros(100_003, dtype=torch.bfloat16, device=device))
    ours = trainstream.OffloadAdamW([weight], max_grad_norm=1.0)
    weight.grad = torch.randn(weight.shape, device=device).to(weight.dtype)
    exact = weight.grad.double().norm().item()
    ours.step()
    assert ours.last_grad_norm == pytest.approx(exact, rel=1e-12)


def test_norm_does_not_depend_on_threads(device: str) -> None:
    """1, 2 and 7 threads give the same bits."""
    norms = set()
    for threads in (1, 2, 7):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.zeros(1_000_003, device=device))
        ours = trainstream.OffloadAdamW([weight], max_grad_norm=1.0, threads=threads)
        weight.grad = torch.randn(weight.shape).to(device) * torch.logspace(-6, 6, 1_000_003).to(device)
        ours.step()
        norms.add(ours.last_grad_norm)
    assert len(norms) == 1


def test_edited_gradients_count_as_edited(device: str) -> None:
    """The norm is that of the gradients at step(), after the user's own edits."""
    reference, plain, model, ours = twins(Mlp, device, max_grad_norm=0.1)
    for i in range(5):
        for net, optimizer in ((reference, plain), (model, ours)):
            optimizer.zero_grad()
            net.loss(torch.Generator().manual_seed(i)).backward()
            torch.nn.utils.clip_grad_value_(net.parameters(), 0.01)
            for p in net.parameters():
                p.grad.mul_(3.0)
        norm = clipped(reference.parameters(), 0.1)
        plain.step()
        ours.step()
        assert ours.last_grad_norm == pytest.approx(norm, rel=1e-5)
    assert_close(model, reference)


class Experts(nn.Module):
    """Four experts; one is never used, one in one micro-batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))

    def forward(self, x: torch.Tensor, routed: list[int]) -> torch.Tensor:
        return sum(self.experts[i](x) for i in routed).square().mean()


def test_parameters_without_gradient(device: str) -> None:
    """B04: the norm is over the gradients there are; an expert that is never used keeps its bytes."""
    reference, plain, model, ours = twins(Experts, device, max_grad_norm=1.0)
    idle = weights(model.experts[3])
    for i in range(5):
        for net, optimizer in ((reference, plain), (model, ours)):
            generator = torch.Generator().manual_seed(i)
            optimizer.zero_grad()
            for micro in range(4):
                x = torch.randn(5, 7, generator=generator).to(device)
                (net(x, [0, 1, 2] if micro == 2 else [0, 1]) / 4).backward()
        norm = clipped(reference.parameters(), 1.0)
        plain.step()
        ours.step()
        assert ours.last_grad_norm == pytest.approx(norm, rel=1e-6)
    assert_close(model, reference)
    assert_equal(weights(model.experts[3]), idle)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_step_that_is_not_finite_changes_nothing(bad: float, device: str, caplog: pytest.LogCaptureFixture) -> None:
    """One bad gradient: weights, moments and step counts keep their bytes, the step is counted and told."""
    straight, _, model, ours = twins(Gpt, device, max_grad_norm=math.inf)
    straight, unclipped = trainstream.wrap(straight, adamw(straight.parameters()))
    for i in (0, 1):
        step(straight, unclipped, i)
        step(model, ours, i)
    before, state = weights(model), ours.state_dict()["state"]
    ours.zero_grad()
    model.loss(torch.Generator()).backward()
    model.blocks[1].gain.grad.fill_(bad)
    ours.step()
    assert_equal(weights(model), before)
    for i, theirs in ours.state_dict()["state"].items():
        assert_equal(theirs, state[i])
    with caplog.at_level(logging.WARNING, "trainstream"):
        step(straight, unclipped, 2)
        step(model, ours, 2)
    assert "skipped" in caplog.text
    assert_equal(weights(model), weights(straight))
    assert ours.stats()["skipped_steps"] == 1 and ours.stats()["steps"] == 4
    assert math.isfinite(ours.last_grad_norm)


def test_without_a_norm_nan_is_torchs(device: str) -> None:
    """Without max_grad_norm a NaN gradient makes NaN weights, as in torch."""
    reference, plain, model, ours = twins(Mlp, device)
    for net, optimizer in ((reference, plain), (model, ours)):
        net.loss(torch.Generator().manual_seed(0)).backward()
        net.head.bias.grad[2] = math.nan
        optimizer.step()
    assert torch.equal(model.head.bias.isnan(), reference.head.bias.isnan())
    assert model.head.bias.isnan().any() and not model.head.weight.isnan().any()
    assert ours.last_grad_norm is None and ours.stats()["skipped_steps"] == 0


def test_random_delays_change_nothing() -> None:
    """Clipping under random delays and poisoned memory gives the same bits."""
    outcomes = []
    for seed in (None, 1, 2, 3, 4, 5):
        faults = {} if seed is None else {"seed": seed, "max_delay_us": 300, "poison": True}
        with inject(**faults):
            _, _, model, ours = twins(Mlp, "cpu", max_grad_norm=0.2)
        for i in range(5):
            step(model, ours, i, backwards=1 + i % 2)
        outcomes.append(weights(model))
    for outcome in outcomes[1:]:
        assert_equal(outcome, outcomes[0])


def test_limit_may_change_between_steps(device: str) -> None:
    """max_grad_norm is read at each step(), and checked."""
    reference, plain, model, ours = twins(Mlp, device)
    for i, limit in enumerate([None, 0.1, 0.01, None, 0.1]):
        ours.max_grad_norm = limit
        reference.loss(torch.Generator().manual_seed(i)).backward()
        if limit is not None:
            clipped(reference.parameters(), limit)
        plain.step()
        plain.zero_grad()
        step(model, ours, i)
    assert_close(model, reference)
    ours.max_grad_norm = -1.0
    before = weights(model)
    with pytest.raises(trainstream.ConfigError, match="max_grad_norm=-1"):
        step(model, ours)
    assert_equal(weights(model), before)
