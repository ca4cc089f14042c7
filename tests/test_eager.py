"""eager=True: updates inside backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import trainstream
from models import Chooser, Gpt, Mlp, adamw, assert_close, assert_equal, assert_moved, step, twins, weights
from trainstream import ConfigError
from trainstream.bridge import inject


def train_both(reference: Any, plain: Any, model: Any, ours: Any, steps: int, backwards: int = 1) -> None:
    for i in range(steps):
        step(reference, plain, i, backwards)
        step(model, ours, i, backwards)


@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("build", [Mlp, Gpt])
def test_eager_training_is_torchs(build: Any, backwards: int, device: str) -> None:
    """Ten steps of one or three backwards follow AdamW, tied weights included."""
    both = twins(build, device, lambda m: adamw(m.parameters(), eps=1e-6), eager=True, accumulation_steps=backwards)
    start = weights(both[2])
    train_both(*both, steps=10, backwards=backwards)
    assert_close(both[2], both[0])
    assert_moved(both[2], start)
    assert both[3].stats()["steps"] == 10
    assert {int(s["step"]) for s in both[3].state_dict()["state"].values()} == {10}


def test_gradients_zeroed_in_place(device: str) -> None:
    """zero_grad(set_to_none=False) keeps the gradients, and the count of backwards starts anew."""
    reference, plain, model, ours = twins(Mlp, device, eager=True, accumulation_steps=2)
    for net, optimizer in ((reference, plain), (model, ours)):
        generator = torch.Generator().manual_seed(5)
        for _ in range(4):
            for _ in range(2):
                net.loss(generator).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert_close(model, reference)


def test_weights_change_inside_backward(device: str) -> None:
    """After backward and before step() the update is done; step() does no other."""
    reference, plain, model, ours = twins(Mlp, device, eager=True)
    step(reference, plain)
    model.loss(torch.Generator().manual_seed(0)).backward()
    ours.synchronize()
    assert_close(model, reference)
    after = weights(model)
    ours.step()
    assert_equal(weights(model), after)


def test_unused_branch_is_left_alone(device: str) -> None:
    """A branch without gradients is not updated; one with fewer backwards than declared is, in step()."""
    reference, plain, model, ours = twins(Chooser, device, eager=True, accumulation_steps=2)
    for branches in ("aa", "ab", "bb", "ba"):
        for net, optimizer in ((reference, plain), (model, ours)):
            generator = torch.Generator().manual_seed(5)
            optimizer.zero_grad()
            for net.use in branches:
                net.loss(generator).backward()
            optimizer.step()
    assert_close(model, reference)


def test_one_backward_too_many_is_refused(device: str) -> None:
    """A gradient after the update raises with the option to change, and a step() later all is well."""
    _, _, model, ours = twins(Mlp, device, eager=True)
    generator = torch.Generator().manual_seed(0)
    model.loss(generator).backward()
    with pytest.raises(ConfigError, match="accumulation_steps=1"):
        model.loss(generator).backward()
    ours.step()
    ours.zero_grad()
    step(model, ours)


class Recomputed(nn.Module):
    """Blocks that are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(3))

    def loss(self, generator: torch.Generator) -> torch.Tensor:
        x = torch.randn(4, 9, generator=generator).to(self.blocks[0][0].weight.device)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


def test_checkpointed_blocks(device: str) -> None:
    """Blocks recomputed in backward use the weights of before the update."""
    both = twins(Recomputed, device, eager=True)
    train_both(*both, steps=5)
    assert_close(both[2], both[0])


@pytest.mark.parametrize("seed", range(6))
def test_delays_do_not_show(seed: int) -> None:
    """Random delays and poisoned memory change no bit."""
    outcomes = []
    for faults in ({}, {"seed": seed, "max_delay_us": 500, "poison": True}):
        with inject(**faults):
            _, _, model, ours = twins(Gpt, "cpu", eager=True, accumulation_steps=2)
        for i in range(4):
            step(model, ours, i, backwards=2)
        outcomes.append(weights(model))
    assert_equal(*outcomes)


def test_learning_rate_is_that_of_backward(device: str) -> None:
    """The learning rate set before backward counts, as documented."""
    reference, plain, model, ours = twins(Mlp, device, eager=True)
    for i, lr in enumerate([1e-3, 5e-3, 1e-4]):
        for net, optimizer in ((reference, plain), (model, ours)):
            optimizer.param_groups[0]["lr"] = lr
            step(net, optimizer, i)
    assert_close(model, reference)
    with pytest.raises(ConfigError, match="lr=-1"):
        ours.param_groups[0]["lr"] = -1.0
        step(model, ours)


def test_unwrap_after_eager_training(device: str) -> None:
    """The last update is in the weights that unwrap() gives back."""
    reference, plain, model, ours = twins(Mlp, device, eager=True)
    train_both(reference, plain, model, ours, steps=2)
    model, optimizer = trainstream.unwrap(model)
    step(reference, plain, 2)
    step(model, optimizer, 2)
    assert_close(model, reference)
