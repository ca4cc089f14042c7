"""Training with the host optimizer against torch.optim.AdamW and Adam."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import trainstream
from models import (
    TOLERANCE,
    Gpt,
    Masters,
    Mlp,
    Strides,
    adamw,
    assert_close,
    assert_moved,
    assert_rounded,
    train,
    train_both,
    twins,
    weights,
)

STEPS = 20


@pytest.mark.parametrize("build", [Mlp, Gpt, Strides])
def test_fp32_follows_adamw(build: Any, device: str) -> None:
    """20 fp32 steps stay within 3e-7 of torch.optim.AdamW, for ordinary, tied, 0-dim, (1,) and strided weights."""
    # Some of the GPT's gradients are smaller than the rounding errors in them: with eps far below those, torch's
    # own foreach and fused AdamW differ by 5.6e-7. The test after this one covers the arithmetic at that scale.
    eps = 1e-6 if build is Gpt else 1e-8
    reference, plain, model, ours = twins(build, device, lambda m: adamw(m.parameters(), eps=eps))
    start, strides = weights(model), [p.stride() for p in model.parameters()]
    train_both(reference, plain, model, ours, STEPS)
    assert_close(model, reference, TOLERANCE)
    assert_moved(model, start)
    assert [p.stride() for p in model.parameters()] == strides


def test_same_gradients_of_any_size(device: str) -> None:
    """20 steps with given gradients from 1 down to 1e-19 stay within 3e-7 of torch.optim.AdamW."""
    reference, plain, model, ours = twins(Gpt, device)
    start = weights(model)
    for i in range(STEPS):
        for p, q in zip(reference.parameters(), model.parameters(), strict=True):
            p.grad = torch.randn_like(p) * 10.0**-i
            q.grad = p.grad.clone()
        plain.step()
        ours.step()
    assert_close(model, reference, TOLERANCE)
    assert_moved(model, start)


@pytest.mark.parametrize("when", ["before wrap", "after wrap", "after a step", "between backward and step"])
def test_memory_format_may_change(when: str, device: str) -> None:
    """B23: weights moved to channels_last at any time train as before, and keep the new strides."""
    torch.manual_seed(3)
    reference = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 3)).to(device)
    model = copy.deepcopy(reference)
    if when == "before wrap":
        model.to(memory_format=torch.channels_last)
    plain = adamw(reference.parameters())
    model, ours = trainstream.wrap(model, adamw(model.parameters()))
    for i in range(5):
        if when == "after wrap" or (when == "after a step" and i == 2):
            model.to(memory_format=torch.channels_last)
        for p, q in zip(reference.parameters(), model.parameters(), strict=True):
            p.grad = torch.randn(p.shape, device=device)
            q.grad = p.grad.clone()
        if when == "between backward and step" and i == 2:
            x = torch.randn(2, 3, 8, 8, device=device)
            grads = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
            for p, grad in zip(reference.parameters(), grads, strict=True):
                p.grad = grad.contiguous()
            ours.zero_grad()
            model(x).square().mean().backward()
            for p in model.parameters():
                p.data = p.data.to(memory_format=torch.channels_last) if p.dim() == 4 else p.data
        plain.step()
        ours.step()
    assert_close(model, reference, TOLERANCE)
    assert model[1].weight.is_contiguous(memory_format=torch.channels_last)


def test_tied_weight_stays_one_parameter(device: str) -> None:
    """The head is the embedding after wrap, step and unwrap, has one host state and both keys in the state dict."""
    _, _, model, ours = twins(Gpt, device)
    train(model, ours, 2)
    assert model.head.weight is model.embed.weight
    assert trainstream.memory_report(model)["params"] == sum(p.numel() for p in model.parameters())
    state = model.state_dict()
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    trainstream.unwrap(model)
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("build", [Mlp, pytest.param(partial(Gpt, blocks=1), id="Gpt")])
def test_16_bit_weights_are_the_rounded_fp32_master(build: Any, dtype: torch.dtype, device: str) -> None:
    """20 steps of 16-bit weights are the rounding, bit for bit, of fp32 masters that follow torch's AdamW."""
    torch.manual_seed(3)
    reference = build().to(device, dtype)
    model = copy.deepcopy(reference)
    masters = Masters(reference)
    model, ours = trainstream.wrap(model, adamw(model.parameters()))
    start = weights(model)
    train_both(reference, masters, model, ours, STEPS, free=False)
    assert_rounded(model, ours, masters)
    assert any(not torch.equal(w, start[name]) for name, w in weights(model).items())


@pytest.mark.parametrize(
    "options",
    [
        {"maximize": True},
        {"betas": (0.3, 0.95)},
        {"betas": (0.0, 0.0), "eps": 1e-6},  # the step is g / (|g| + eps): tiny gradients count in full
        {"amsgrad": True, "betas": (0.5, 0.6)},
        {"eps": 1e-3, "weight_decay": 0.0},
        {"lr": 1e-2, "weight_decay": 0.5},
    ],
    ids=str,
)
def test_hyper_parameters(options: dict[str, Any], device: str) -> None:
    """Each hyper-parameter has the effect that it has in torch.optim.AdamW."""
    reference, plain, model, ours = twins(Mlp, device, lambda m: adamw(m.parameters(), **options))
    train_both(reference, plain, model, ours, 10)
    assert_close(model, reference, TOLERANCE)


def test_tensor_learning_rate(device: str) -> None:
    """A learning rate given as a tensor trains as in torch.optim.AdamW."""
    reference, plain, model, ours = twins(Mlp, device, lambda m: adamw(m.parameters(), lr=torch.tensor(2e-3)))
    train_both(reference, plain, model, ours, 5)
    assert_close(model, reference, TOLERANCE)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam_with_weight_decay(amsgrad: bool, decoupled: bool, device: str) -> None:
    """torch.optim.Adam's decay is kept: L2 in the gradient, or decoupled where it was asked for."""

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(
            model.parameters(),
            1e-3,
            weight_decay=0.3,
            amsgrad=amsgrad,
            foreach=False,
            decoupled_weight_decay=decoupled,
        )

    reference, plain, model, ours = twins(Mlp, device, adam)
    train_both(reference, plain, model, ours, 10)
    assert_close(model, reference, TOLERANCE)


def test_groups_keep_their_own_settings(device: str) -> None:
    """Two groups with other lr, decay and betas, and a frozen one between, follow torch.optim.AdamW."""

    def grouped(model: Any) -> torch.optim.Optimizer:
        model.layers[1].requires_grad_(False)
        return adamw(
            [
                {"params": list(model.layers[0].parameters()), "lr": 3e-3, "weight_decay": 0.0},
                {"params": list(model.layers[1].parameters())},
                {"params": [*model.layers[2].parameters(), *model.head.parameters()], "betas": (0.7, 0.9)},
            ]
        )

    reference, plain, model, ours = twins(Mlp, device, grouped)
    start = weights(model)
    train_both(reference, plain, model, ours, 10)
    assert_close(model, reference, TOLERANCE)
    assert_moved(model, start)
    assert torch.equal(model.layers[1].weight, start["layers.1.weight"])
    assert [len(g["params"]) for g in ours.param_groups] == [2, 2, 4]


class Mixed(nn.Module):
    """bf16, fp32 and fp16 layers after each other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(17, 65).bfloat16(), nn.Linear(65, 31), nn.Linear(31, 3).half()

    def loss(self, generator: torch.Generator) -> torch.Tensor:
        x = torch.randn(8, 17, generator=generator).to(self.a.weight.device)
        return self.c(self.b(self.a(x.bfloat16()).float()).tanh().half()).float().square().mean()


def test_mixed_dtypes_in_one_model(device: str) -> None:
    """16-bit weights equal the rounding of fp32 masters beside fp32 weights, and every dtype is kept."""
    torch.manual_seed(3)
    reference = Mixed().to(device)
    model = copy.deepcopy(reference)
    dtypes = [p.dtype for p in model.parameters()]
    masters = Masters(reference)
    model, ours = trainstream.wrap(model, adamw(model.parameters()))
    train_both(reference, masters, model, ours, 5, free=False)
    assert_rounded(model, ours, masters)
    assert [p.dtype for p in model.parameters()] == dtypes


class Flat(nn.Module):
    """Large parameters whose gradient is computed element by element."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (4_194_304 + 77, 1_048_576 + 1, 1_000_003, 1)
        self.parts = nn.ParameterList(torch.randn(n) for n in sizes)

    def loss(self, generator: torch.Generator) -> torch.Tensor:
        del generator
        return sum((p - 0.5).square().sum() for p in self.parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_odd_tensors(dtype: torch.dtype, device: str) -> None:
    """Every element of tensors of 4M+77, 1M+1 and 1,000,003 elements is updated as in torch."""
    torch.manual_seed(3)
    reference = Flat().to(device, dtype)
    model = copy.deepcopy(reference)
    plain = adamw(reference.parameters()) if dtype == torch.float32 else Masters(reference)
    model, ours = trainstream.wrap(model, adamw(model.parameters()))
    train_both(reference, plain, model, ours, 3, free=False)
    if dtype == torch.float32:
        assert_close(model, reference, TOLERANCE)
    else:
        assert_rounded(model, ours, plain)
