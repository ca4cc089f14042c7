"""Gradients between backward and step: dropped, summed, clipped, changed and read as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trainstream
from models import Chooser, Gpt, Mlp, adamw, assert_close, assert_equal, step, train, twins, weights
from trainstream.bridge import inject

Use = Callable[[Any, Any, torch.Generator], None]


def compare(use: Use, device: str, build: Any = Mlp, steps: int = 4, **faults: Any) -> None:
    """``use(model, optimizer, generator)`` does the same to a wrapped model as to one with torch's optimizer."""
    with inject(**faults):
        reference, plain, model, ours = twins(build, device)
    for net, optimizer in ((reference, plain), (model, ours)):
        generator = torch.Generator().manual_seed(5)
        for _ in range(steps):
            use(net, optimizer, generator)
    assert_close(model, reference)


def drop(name: str) -> Use:
    def use(model: Any, optimizer: Any, generator: torch.Generator) -> None:
        for _ in range(2):
            (1000 * model.loss(generator)).backward()
            {
                "optimizer": optimizer.zero_grad,
                "zeros": lambda: optimizer.zero_grad(set_to_none=False),
                "model": model.zero_grad,
                "model zeros": lambda: model.zero_grad(set_to_none=False),
                "none": lambda: [setattr(p, "grad", None) for p in model.parameters()],
            }[name]()
        model.loss(generator).backward()
        optimizer.step()

    return use


@pytest.mark.parametrize("name", ["optimizer", "zeros", "model", "model zeros", "none"])
@pytest.mark.parametrize("slow", [False, True])
def test_dropped_gradients_leave_no_trace(name: str, slow: bool, device: str) -> None:
    """B06: whatever way a bad batch's gradients are dropped, also in flight, the result is torch's."""
    if slow and device == "cuda":
        pytest.skip("delays are injected on the host device only")
    compare(drop(name), device, **({"seed": 1, "max_delay_us": 3000} if slow else {}))


def test_weights_change_only_in_step(device: str) -> None:
    """B07: backward, a second backward and a skipped step change no weight."""
    _, _, model, ours = twins(Mlp, device)
    start = weights(model)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        model.loss(generator).backward()
        ours.synchronize()
        assert_equal(weights(model), start)
    ours.zero_grad()
    ours.step()
    assert_equal(weights(model), start)
    assert not ours.state_dict()["state"]


def test_lr_between_backward_and_step_counts(device: str) -> None:
    """B07: the learning rate at step() is the one used, and a step left out drops nothing else."""

    def use(model: Any, optimizer: Any, generator: torch.Generator) -> None:
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.7
        model.loss(generator).backward()
        optimizer.param_groups[0]["lr"] = 2e-3
        if int(torch.randint(2, (), generator=generator)):
            optimizer.step()

    compare(use, device, steps=6)


@pytest.mark.parametrize("build", [Mlp, Gpt])
def test_any_number_of_backwards(build: Any, device: str) -> None:
    """B08: 1, 4 and 2 backwards before a step give torch's weights."""
    counts = iter([1, 4, 2] * 2)
    compare(lambda m, o, g: step(m, o, int(g.initial_seed()), next(counts)) and None, device, build, steps=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_summed_in_fp32(dtype: torch.dtype, device: str) -> None:
    """B08: 1 and 256 times 1/512 make 1.5, where a bf16 sum stays at 1."""
    model = nn.ParameterList([torch.zeros(3, dtype=dtype, device=device)])
    model, _ = trainstream.wrap(model, adamw(model.parameters()))
    for i in range(257):
        (model[0] * (1.0 if i == 0 else 1 / 512)).sum().backward()
    assert model[0].grad.dtype == dtype
    assert model[0].grad.float().tolist() == [1.5] * 3


def clip(name: str) -> Use:
    def use(model: Any, optimizer: Any, generator: torch.Generator) -> None:
        optimizer.zero_grad()
        for _ in range(2):
            (1000 * model.loss(generator)).backward()
        if name == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=False)
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=name == "foreach")
            assert norm > 10
        optimizer.step()

    return use


@pytest.mark.parametrize("name", ["foreach", "single", "value"])
def test_clipping_changes_the_update(name: str, device: str) -> None:
    """B18: torch's clipping functions act on the update as they do in torch, after accumulation too."""
    compare(clip(name), device)


def test_clipping_reports_and_applies_the_norm(device: str) -> None:
    """B18: clip_grad_norm_ returns torch's norm, and the gradients have norm 1 after it."""
    reference, _, model, _ = twins(Mlp, device)
    norms = []
    for net in (reference, model):
        (1000 * net.loss(torch.Generator().manual_seed(1))).backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 1.0).item())
        assert nn.utils.get_total_norm([p.grad for p in net.parameters()]).item() == pytest.approx(1, rel=1e-4)
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


EDITS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "mul_": lambda p, g: p.grad.mul_(0.25),
    "imul": lambda p, g: p.grad.__imul__(0.25),
    "add_": lambda p, g: p.grad.add_(g),
    "add_ alpha": lambda p, g: p.grad.add_(p.detach(), alpha=0.1),
    "copy_": lambda p, g: p.grad.copy_(g),
    "item": lambda p, g: p.grad.__setitem__(0, 3.0),
    "zero_": lambda p, g: p.grad.zero_(),
    "plain tensor": lambda p, g: setattr(p, "grad", g.clone()),
    "scaled": lambda p, g: setattr(p, "grad", p.grad * 0.5),
    "none": lambda p, g: setattr(p, "grad", None),
    "data": lambda p, g: p.grad.data.mul_(0.5),
    "detached": lambda p, g: p.grad.detach().mul_(0.5),
    "foreach": lambda p, g: torch._foreach_mul_([p.grad], 0.5),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_edited_gradient_is_the_one_used(edit: Any, device: str) -> None:
    """Every way to change or replace p.grad between backward and step has torch's effect on the weights."""

    def use(model: Any, optimizer: Any, generator: torch.Generator) -> None:
        optimizer.zero_grad()
        model.loss(generator).backward()
        with torch.no_grad():
            for p in model.layers[1].parameters():
                edit(p, torch.randn(p.shape, generator=generator).to(p.device))
        optimizer.step()

    compare(use, device)


def test_backward_after_an_edit_is_added(device: str) -> None:
    """An edited gradient and a plain tensor assigned to p.grad are added to by the next backward."""

    def use(model: Any, optimizer: Any, generator: torch.Generator) -> None:
        optimizer.zero_grad()
        model.loss(generator).backward()
        model.head.weight.grad.mul_(3)
        model.head.bias.grad = torch.ones_like(model.head.bias)
        model.loss(generator).backward()
        optimizer.step()

    compare(use, device)


def test_gradient_reads_as_in_torch(device: str) -> None:
    """Norms, printing, conversion and metadata of p.grad are those of torch's gradient, also after step()."""
    reference, plain, model, ours = twins(Mlp, device)
    for net in (reference, model):
        net.loss(torch.Generator().manual_seed(1)).backward()
    for name, p in model.named_parameters():
        g = reference.get_parameter(name).grad
        assert (p.grad.shape, p.grad.dtype, p.grad.device, p.grad.stride()) == (g.shape, g.dtype, g.device, g.stride())
        assert p.grad.norm().item() == pytest.approx(g.norm().item(), rel=1e-6)
        assert torch.equal(p.grad.clone(), g) and torch.isfinite(p.grad).all()
        assert p.grad.sum().item() == g.sum().item()
        assert repr(g) in repr(p.grad)
    plain.step()
    ours.step()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad + 0, reference.get_parameter(name).grad), name


def test_gradient_as_numpy(device: str) -> None:
    """p.grad.cpu().numpy() gives torch's values."""
    _, _, model, _ = twins(Mlp, device)
    model.loss(torch.Generator().manual_seed(1)).backward()
    grad = model.head.bias.grad
    assert grad.cpu().numpy().tolist() == grad.clone().tolist()


def test_stale_gradient_raises(device: str) -> None:
    """A gradient kept over zero_grad() and the next backward raises instead of giving other values."""
    _, _, model, _ = twins(Mlp, device)
    generator = torch.Generator().manual_seed(1)
    model.loss(generator).backward()
    old = model.head.bias.grad
    model.zero_grad()
    model.loss(generator).backward()
    with pytest.raises(RuntimeError, match=r"head\.bias was replaced"):
        old.norm()
    assert model.head.bias.grad.norm() > 0


def test_unused_branch_is_left_alone(device: str) -> None:
    """B03: in a step that does not use a branch its weights, moments and step count keep their bytes."""
    reference, plain, model, ours = twins(Chooser, device, lambda m: adamw(m.parameters(), weight_decay=0.5))
    for i, branch in enumerate("abaab"):
        before, state = weights(model), ours.state_dict()["state"]
        for net, optimizer in ((reference, plain), (model, ours)):
            net.use = branch
            step(net, optimizer, i)
        idle = "b" if branch == "a" else "a"
        for index, name in enumerate(("a.weight", "a.bias", "b.weight", "b.bias")):
            if name[0] == idle and index in state:
                assert torch.equal(model.get_parameter(name), before[name])
                now = ours.state_dict()["state"][index]
                assert all(torch.equal(now[k], v) for k, v in state[index].items())
        assert_close(model, reference)
    assert [int(s["step"]) for s in ours.state_dict()["state"].values()] == [3, 3, 2, 2]


def test_parameter_used_in_one_micro_batch(device: str) -> None:
    """B08: a branch that only the second micro-batch uses is updated once with its gradient."""

    def use(model: Any, optimizer: Any, generator: torch.Generator) -> None:
        optimizer.zero_grad()
        for branch in "aba":
            model.use = branch
            model.loss(generator).backward()
        optimizer.step()

    compare(use, device, Chooser)


def test_closure(device: str) -> None:
    """B20: step(closure) runs it with gradients, once, and returns its loss."""
    losses: list[float] = []

    def use(model: Any, optimizer: Any, generator: torch.Generator) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model.loss(generator)
            loss.backward()
            return loss

        with torch.no_grad():
            losses.append(optimizer.step(closure).item())

    compare(use, device)
    assert len(losses) == 8 and losses[:4] == pytest.approx(losses[4:], rel=1e-6)


def test_step_without_gradients_does_nothing(device: str) -> None:
    """step() before any backward changes neither weights nor state."""
    _, _, model, ours = twins(Mlp, device)
    start = weights(model)
    assert ours.step() is None
    assert_equal(weights(model), start)
    assert ours.state_dict()["state"] == {}
    train(model, ours, 1)
    assert len(ours.state_dict()["state"]) == len(start)


def test_norms_and_scaling_stay_on_the_host(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """clip_grad_norm_, foreach norms and scaling by numbers bring no gradient back, and act as in torch."""

    def use(model: Any, optimizer: Any, generator: torch.Generator) -> None:
        optimizer.zero_grad()
        model.loss(generator).backward()
        grads = [p.grad for p in model.parameters()]
        torch._foreach_mul_(grads, 3.0)
        torch._foreach_div_(grads, torch.tensor(1.5, device=device))
        grads[0].mul_(0.5)
        grads[1].div_(-2)
        assert all(torch.equal(a, b.norm()) for a, b in zip(torch._foreach_norm(grads), grads, strict=True))
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()

    def back(*_: Any) -> None:
        raise AssertionError("a gradient came back")

    for name in ("read_gradient", "write_gradient"):
        monkeypatch.setattr(trainstream.slots.Slot, name, back)
    compare(use, device)


@pytest.mark.parametrize("factor", [0.0, float("inf"), float("nan"), 2, torch.tensor(0.25), torch.ones(8) * 0.5])
def test_scaled_gradients_read_and_add_as_in_torch(factor: Any, device: str) -> None:
    """After a factor of any kind p.grad reads as torch's does, and another backward adds to the scaled one."""
    reference, plain, model, ours = twins(Mlp, device)
    factor = factor.to(device) if isinstance(factor, torch.Tensor) else factor
    for net in (reference, model):
        generator = torch.Generator().manual_seed(1)
        net.loss(generator).backward()
        grad = net.head.bias.grad
        grad.mul_(factor)
        grad.mul_(0.5)
        net.loss(generator).backward()
        net.head.bias.grad.div_(3.0)
    torch.testing.assert_close(model.head.bias.grad.clone(), reference.head.bias.grad, equal_nan=True)
    if model.head.bias.grad.isfinite().all():
        plain.step()
        ours.step()
        assert_close(model, reference)


def test_bad_gradients_after_clipping_are_torchs(device: str) -> None:
    """With an infinite gradient clip_grad_norm_ and step() do what they do in torch."""
    reference, plain, model, ours = twins(Mlp, device)
    for net, optimizer in ((reference, plain), (model, ours)):
        net.loss(torch.Generator().manual_seed(1)).backward()
        net.head.bias.grad[2] = float("inf")
        assert nn.utils.clip_grad_norm_(net.parameters(), 1.0).isinf()
        optimizer.step()
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.detach(), p.detach(), equal_nan=True, rtol=1e-6, atol=1e-6)
