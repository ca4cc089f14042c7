"""The forms that host state is kept in: whole, split or no master, fp32 or bf16 moments, with or without amsgrad."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import trainstream
from models import (
    Gpt,
    Masters,
    Mlp,
    adamw,
    assert_close,
    assert_equal,
    assert_moved,
    assert_rounded,
    step,
    train,
    twins,
    weights,
)
from trainstream import ConfigError, OffloadAdamW

BF16 = torch.bfloat16
LAYOUTS = [
    pytest.param({"moment_dtype": moments, "master": master}, id=f"{master}-{moments}")
    for master in ("float32", "split", "none")
    for moments in ("float32", "bfloat16")
]


def wrapped(device: str, dtype: torch.dtype = BF16, seed: int = 3, build: Any = Mlp, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = build().to(device, dtype)
    return trainstream.wrap(model, adamw(model.parameters()), **options)


def give_gradients(models: list[nn.Module], seed: int) -> None:
    """The same gradients for all, of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    for params in zip(*(m.parameters() for m in models), strict=True):
        grad = torch.randn(params[0].shape, generator=generator) * 10.0 ** -(seed % 7)
        for p in params:
            p.grad = grad.to(p.device, BF16).to(p.dtype)  # the same values in every dtype


@pytest.mark.parametrize("master", ["float32", "split"])
def test_200_steps_follow_torch(master: str, device: str) -> None:
    """After 200 steps masters of bf16 weights are within 1e-6 of torch's AdamW, and weights are their rounding."""
    torch.manual_seed(3)
    reference = Mlp().to(BF16)
    model = copy.deepcopy(reference).to(device)
    masters = Masters(reference)
    model, ours = trainstream.wrap(model, adamw(model.parameters()), master=master)
    start = weights(model)
    for i in range(200):
        give_gradients([reference, model], i)
        masters.step()
        ours.step()
    assert_rounded(model, ours, masters, ties="away" if master == "split" else "even")
    assert_moved(model, start)


def test_200_steps_of_fp32_weights_follow_torch(device: str) -> None:
    """After 200 steps fp32 weights are within 1e-6 of torch's AdamW."""
    reference, plain, model, ours = twins(Mlp, device)
    for i in range(200):
        give_gradients([reference, model], i)
        plain.step()
        ours.step()
    assert_close(model, reference, 1e-6)


@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16"])
def test_split_masters_are_the_whole_ones(moment_dtype: str, device: str) -> None:
    """A split master has the bits of a whole one, with the same moments, and takes 4 bytes less with the weight."""
    (whole, one), (split, two) = (
        wrapped(device, master=master, moment_dtype=moment_dtype) for master in ("float32", "split")
    )
    for i in range(50):
        give_gradients([whole, split], i)
        one.step()
        two.step()
    state = two.state_dict()["state"]
    for i, theirs in one.state_dict()["state"].items():
        assert_equal(state[i], theirs)
    count = sum(p.numel() for p in whole.parameters())
    assert one.stats()["host_master_bytes"] == 4 * count  # and 2 for the weights to be sent
    assert two.stats()["host_master_bytes"] == 4 * count  # in all


def test_bf16_moments_track_fp32_moments(device: str) -> None:
    """bf16 moments take 4 bytes per parameter less, and with the same gradients their sum has no bias."""
    count = 100_000
    params = [nn.Parameter(torch.zeros(count, device=device)) for _ in range(2)]
    optimizers = [OffloadAdamW([p], moment_dtype=d) for p, d in zip(params, (torch.float32, BF16), strict=True)]
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        grad = torch.randn(count, generator=generator).to(device)
        for p, optimizer in zip(params, optimizers, strict=True):
            p.grad = grad.clone()
            optimizer.step()
    whole, half = (o.state_dict()["state"][0] for o in optimizers)
    for name in ("exp_avg", "exp_avg_sq"):
        assert half[name].dtype == torch.float32
        assert torch.equal(half[name], half[name].to(BF16).float())
    # Each rounding is off by 2**-9 on average: over 100,000 elements the sum is within 1e-4 of the whole one.
    assert half["exp_avg_sq"].sum().item() == pytest.approx(whole["exp_avg_sq"].sum().item(), rel=1e-4)
    assert optimizers[0].stats()["host_state_bytes"] - optimizers[1].stats()["host_state_bytes"] == 4 * count


def test_weights_without_master_move_on_average(device: str) -> None:
    """Steps of a fortieth of a bf16 unit, which rounding to nearest would lose, add up in the mean."""
    weight = nn.Parameter(torch.ones(200_000, dtype=BF16, device=device))
    ours = OffloadAdamW([weight], lr=1e-4, weight_decay=0.0, master="none", moment_dtype="bfloat16")
    for _ in range(20):
        weight.grad = torch.ones_like(weight)
        ours.step()
    # One draw moves by 2**-8 or not at all: the mean of 200,000 is within 5 sigma of -0.002.
    sigma = (0.002 * 2**-8 / 200_000) ** 0.5
    assert abs(weight.detach().double().mean().item() - 1 + 0.002) < 5 * sigma
    assert "master" not in ours.state_dict()["state"][0]
    assert ours.stats()["host_state_bytes"] == 6 * 200_000


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resume_is_bit_equal(layout: dict[str, str], device: str) -> None:
    """In each layout 4 steps, save, load into a fresh model and 4 steps give the bits of 8 steps."""
    straight, optimizer = wrapped(device, **layout)
    train(straight, optimizer, 8)
    first, optimizer = wrapped(device, **layout)
    train(first, optimizer, 4)
    saved = first.state_dict(), optimizer.state_dict()
    second, optimizer = wrapped(device, seed=99, **layout)
    second.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(second, optimizer, 4, first=4)
    assert_equal(weights(second), weights(straight))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_changes_from_outside_arrive(layout: dict[str, str], device: str) -> None:
    """Elements written by the user are where the next step starts from; the others keep their precision."""
    model, ours = wrapped(device, **layout)
    train(model, ours, 3)
    before = ours.state_dict()["state"][0]
    with torch.no_grad():
        model.layers[0].weight[3:5] = 7.0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for group in ours.param_groups:
        group["lr"] = 0.0
    ours.step()
    assert (model.layers[0].weight[3:5] == 7.0).all()
    if layout["master"] != "none":
        after = ours.state_dict()["state"][0]["master"]
        assert (after[3:5] == 7.0).all()
        assert torch.equal(after[5:], before["master"][5:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_format_may_change(layout: dict[str, str], device: str) -> None:
    """Weights moved to channels_last, at an old address too, keep their values, state and summed gradients."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(16, 32, 3)).to(device, BF16)
    model, ours = trainstream.wrap(model, adamw(model.parameters(), lr=0.0, weight_decay=0.0), **layout)
    before = model[0].weight.detach().clone()
    for i in range(6):
        ours.zero_grad()
        for value in (1.0, 1 / 512, 1 / 512):  # a bf16 sum would lose the others
            (model[0].weight * value).sum().backward()
        model.float()
        form = torch.channels_last if i % 2 == 0 else torch.contiguous_format
        model.to(BF16, memory_format=form)
        ours.step()
        assert torch.equal(model[0].weight, before) and model[0].weight.is_contiguous(memory_format=form)
    if layout["moment_dtype"] == "float32":
        expected = (1 + 2 / 512) * (1 - 0.9**6)
        assert ours.state_dict()["state"][0]["exp_avg"].flatten().tolist() == pytest.approx([expected] * 4608, 1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resume_after_unfreezing_is_bit_equal(layout: dict[str, str], device: str) -> None:
    """Random bits belong to a parameter's place, not to the order in which parameters came to be trained."""

    def fresh(frozen: bool) -> tuple[Any, Any]:
        torch.manual_seed(3)
        model = Mlp().to(device, BF16)
        model.layers[0].requires_grad_(not frozen)
        return trainstream.wrap(model, adamw(model.parameters()), **layout)

    straight, optimizer = fresh(frozen=True)
    train(straight, optimizer, 2)
    straight.layers[0].requires_grad_(True)
    train(straight, optimizer, 2, first=2)
    saved = copy.deepcopy(straight.state_dict()), optimizer.state_dict()
    train(straight, optimizer, 4, first=4)
    second, optimizer = fresh(frozen=False)
    second.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(second, optimizer, 4, first=4)
    assert_equal(weights(second), weights(straight))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_of_any_payload_stays_a_nan(layout: dict[str, str], device: str) -> None:
    """A loaded moment that is a NaN with all payload bits set makes NaN weights, not zeros."""
    model, ours = wrapped(device, **layout)
    train(model, ours, 1)
    state = ours.state_dict()
    state["state"][1]["exp_avg"].view(torch.int32)[3] = 0x7FFFFFFF
    ours.load_state_dict(state)
    train(model, ours, 1)
    assert model.layers[0].bias[3].isnan() and not model.layers[0].bias[:3].isnan().any()


def test_accumulation_of_257_micro_batches(device: str) -> None:
    """1 and 256 gradients of 1/512 in bf16 add up to 1.5, which a bf16 sum would lose."""
    weight = nn.Parameter(torch.zeros(1000, dtype=BF16, device=device))
    ours = OffloadAdamW([weight], lr=1.0, betas=(0.0, 0.999), weight_decay=0.0)
    for i in range(257):
        (weight * (1.0 if i == 0 else 1 / 512)).sum().backward()
    assert (weight.grad == 1.5).all()
    ours.step()
    assert (ours.state_dict()["state"][0]["exp_avg"] == 1.5).all()


@pytest.mark.parametrize("layout", [{}, {"moment_dtype": "bfloat16"}], ids=str)
def test_amsgrad_keeps_the_largest_moment(layout: dict[str, str], device: str) -> None:
    """amsgrad's state is torch's, goes both ways, and the step uses it."""
    reference, plain, model, ours = twins(
        Mlp, device, lambda m: adamw(m.parameters(), amsgrad=True, betas=(0.5, 0.5)), **layout
    )
    for i in range(10):
        give_gradients([reference, model], i)  # smaller and smaller, then large again
        plain.step()
        ours.step()
    state = ours.state_dict()
    assert state["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master"}
    tolerance = 2e-2 if layout else 1e-6
    for i, theirs in plain.state_dict()["state"].items():
        mine = state["state"][i]
        torch.testing.assert_close(mine["max_exp_avg_sq"], theirs["max_exp_avg_sq"].cpu(), rtol=tolerance, atol=0)
    assert_close(model, reference, 1e-3 if layout else 1e-6)
    plain.load_state_dict(state)
    ours.load_state_dict(plain.state_dict())
    assert_equal(ours.state_dict()["state"][0], state["state"][0])
    _, unwrapped = trainstream.unwrap(model)
    assert unwrapped.param_groups[0]["amsgrad"] and "max_exp_avg_sq" in unwrapped.state_dict()["state"][0]


def test_amsgrad_cannot_change(device: str) -> None:
    """Switching amsgrad of a group that has state is refused by name before anything is updated."""
    model, ours = wrapped(device)
    train(model, ours, 2)
    before = weights(model)
    model.loss(torch.Generator()).backward()
    ours.param_groups[0]["amsgrad"] = True
    with pytest.raises(ConfigError, match=r"amsgrad=True of group 0.*layers\.0\.weight"):
        ours.step()
    assert_equal(weights(model), before)
    ours.param_groups[0]["amsgrad"] = False
    ours.step()
    assert_moved(model, before)


def test_layouts_in_one_model(device: str) -> None:
    """A split master applies to the bf16 weights; fp32 and fp16 weights beside them are trained as ever."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.randn(70, dtype=d)) for d in (BF16, torch.float32, torch.half))

    torch.manual_seed(3)
    reference = Three()
    model = copy.deepcopy(reference).to(device)
    masters = Masters(reference)
    model, ours = trainstream.wrap(model, adamw(model.parameters()), master="split")
    for i in range(10):
        give_gradients([reference, model], i)
        masters.step()
        ours.step()
    assert_rounded(model, ours, masters, ties="away")
    assert ours.stats()["host_master_bytes"] == 70 * (4 + 4 + 4)


def demo() -> Any:
    path = Path(__file__).parent.parent / "examples" / "train_text.py"
    spec = importlib.util.spec_from_file_location("train_text", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_text"] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


def test_bf16_moments_train_the_demo(device: str) -> None:
    """The demo's loss with bf16 moments is within 1 % of that with fp32 moments."""
    train_text = demo()
    corpus = train_text.Corpus()
    args = SimpleNamespace(
        steps=150, batch=8, width=64, layers=2, context=64, lr=3e-3, seed=0, dtype="float32", device=device, quiet=True
    )
    losses = []
    for moment_dtype in ("float32", "bfloat16"):
        model, optimizer = train_text.build(args, corpus)
        model, optimizer = trainstream.wrap(model, optimizer, device=device, moment_dtype=moment_dtype)
        losses.append(train_text.train(moment_dtype, model, optimizer, corpus, args).final_loss)
    assert losses[0] < 2.8, "the demo did not learn"
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpt_learns_in_each_layout(layout: dict[str, str], device: str) -> None:
    """A small GPT fits one batch in every layout."""
    torch.manual_seed(3)
    model = Gpt().to(device, BF16)
    model, ours = trainstream.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **layout)
    losses = [step(model, ours, 0) for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]
