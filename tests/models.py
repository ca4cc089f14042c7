"""Small models, a training loop and comparisons for the tests."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import trainstream

TOLERANCE = 3e-7
#: On a GPU, for models that go on training after they differ in a last bit: Adam amplifies that.
FEEDBACK = 2e-5
F = nn.functional


class Mlp(nn.Module):
    """Linear and GELU layers of odd width."""

    def __init__(self, width: int = 33, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.head(x)

    def loss(self, generator: torch.Generator) -> Tensor:
        p = self.head.weight
        x = torch.randn(16, p.shape[1], generator=generator).to(p.device, p.dtype)
        y = torch.randn(16, 8, generator=generator).to(p.device, p.dtype)
        return F.mse_loss(self(x).float(), y.float())


class Block(nn.Module):
    """Attention and MLP; no key bias, whose gradient would be rounding noise."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, -1))
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        scores = (q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5).masked_fill(~mask, float("-inf"))
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d)) * self.gain
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Gpt(nn.Module):
    """A causal model with tied embedding and head, LayerNorm, a 0-dim scale and (1,) gains."""

    def __init__(self, vocabulary: int = 61, d: int = 32, blocks: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.place = nn.Parameter(torch.randn(16, d) * 0.1)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=0.2)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale

    def loss(self, generator: torch.Generator) -> Tensor:
        tokens = torch.randint(0, self.embed.num_embeddings, (4, 17), generator=generator).to(self.scale.device)
        logits = self(tokens[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Strides(nn.Module):
    """A channels_last convolution, a transposed parameter, a batch of rows and a gradient that arrives expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.conv.to(memory_format=torch.channels_last)
        self.tilted = nn.Parameter(torch.randn(5, 3).t())
        self.summed = nn.Parameter(torch.randn(7, 2))
        self.row = nn.Parameter(torch.randn(2, 1, 100))  # bmm gives it a gradient with other strides

    def loss(self, generator: torch.Generator) -> Tensor:
        x = torch.randn(2, 3, 6, 6, generator=generator).to(self.summed.device)
        y = self.conv(x.contiguous(memory_format=torch.channels_last))
        z = x[:, :, 0, :5] * self.tilted
        w = torch.bmm(self.row, torch.randn(2, 100, 3, generator=generator).to(x.device))
        return y.square().mean() + (z - 1).square().mean() + self.summed.sum() + w.square().mean()


class Chooser(nn.Module):
    """Two branches of which each step uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(9, 9), nn.Linear(9, 9)
        self.use = "a"

    def loss(self, generator: torch.Generator) -> Tensor:
        x = torch.randn(4, 9, generator=generator).to(self.a.weight.device)
        return getattr(self, self.use)(x).square().mean()


def adamw(params: Iterable[Any], **options: Any) -> torch.optim.AdamW:
    """torch's AdamW without its multi-tensor kernels."""
    return torch.optim.AdamW(params, **{"lr": 1e-3, "weight_decay": 0.1, "foreach": False, **options})


def twins(
    build: Callable[[], nn.Module],
    device: str = "cpu",
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda m: adamw(m.parameters()),
    **options: Any,
) -> tuple[Any, Any, Any, Any]:
    """The same model twice: with torch's optimizer, and wrapped."""
    torch.manual_seed(3)
    reference = build().to(device)
    model = copy.deepcopy(reference)
    plain = optimizer(reference)
    model, ours = trainstream.wrap(model, optimizer(model), **options)
    return reference, plain, model, ours


def step(model: Any, optimizer: Any, seed: int = 0, backwards: int = 1) -> float:
    """One step with this seed's batches."""
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    for _ in range(backwards):
        loss = model.loss(generator)
        (loss / backwards).backward()
    optimizer.step()
    return loss.item()


def train(model: Any, optimizer: Any, steps: int, first: int = 0) -> None:
    """Steps with the batches ``first``, ``first + 1``, ..."""
    for i in range(first, first + steps):
        step(model, optimizer, i)


def train_both(reference: Any, plain: Any, model: Any, ours: Any, steps: int, *, free: bool = True) -> None:
    """The same steps for both. On a CPU and if ``free``, each with its own gradients.

    Otherwise the reference gets the model's gradients, from ``autograd.grad``, which nothing of ours touches. On a GPU
    the last bit of a weight can change the order of a sum, and Adam makes a step of that; with 16-bit weights the last
    bit of a master can change a rounding.
    """
    if free and next(model.parameters()).device.type == "cpu":
        train(reference, plain, steps)
        train(model, ours, steps)
        return
    trained = [(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True) if p.requires_grad]
    for i in range(steps):
        loss = model.loss(torch.Generator().manual_seed(i))
        grads = torch.autograd.grad(loss, [p for p, _ in trained], allow_unused=True)
        for (_, q), grad in zip(trained, grads, strict=True):
            q.grad = None if grad is None else grad.clone()
        plain.step()
        step(model, ours, i)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_close(model: nn.Module, reference: nn.Module, tolerance: float | None = None) -> None:
    """Every weight agrees with the reference within ``tolerance * max(1, |w|)``, and is a number."""
    if tolerance is None:
        tolerance = TOLERANCE if next(model.parameters()).device.type == "cpu" else FEEDBACK
    expected = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        w = expected[name].detach()
        assert p.shape == w.shape and p.dtype == w.dtype, name
        excess = ((p.detach() - w).abs() / w.abs().clamp(min=1)).max().item()
        assert excess <= tolerance, f"{name} differs by {excess:.3g}"


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names, and the same bits under each."""
    assert got.keys() == expected.keys()
    for name, w in expected.items():
        assert got[name].dtype == w.dtype, name
        assert torch.equal(got[name].cpu(), w.cpu()), f"{name} differs: {(got[name].cpu() - w.cpu()).abs().max()}"


def assert_moved(model: nn.Module, start: dict[str, Tensor]) -> None:
    """Every trained weight changed, so that a comparison proves something."""
    for name, p in model.named_parameters():
        assert not p.requires_grad or not torch.equal(p.detach().cpu(), start[name].cpu()), f"{name} did not move"


class Masters:
    """The reference for 16-bit weights: torch's AdamW on fp32 masters on the CPU, rounded into the model."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.masters = [nn.Parameter(p.detach().float().cpu().clone()) for p in self.params]
        self.optimizer = adamw(self.masters, **options)

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def step(self) -> None:
        for p, master in zip(self.params, self.masters, strict=True):
            master.grad = None if p.grad is None else p.grad.float().cpu()
        self.optimizer.step()
        with torch.no_grad():
            for p, master in zip(self.params, self.masters, strict=True):
                p.copy_(master)


def assert_rounded(model: nn.Module, ours: Any, masters: Masters, *, ties: str = "even") -> None:
    """16-bit weights are the rounding of our fp32 masters, bit for bit, and those agree with the reference's.

    ``ties`` of bfloat16 go to ``"even"`` or ``"away"`` from zero.
    """
    state = ours.state_dict()["state"]
    for i, (p, theirs) in enumerate(zip(model.parameters(), masters.masters, strict=True)):
        ours_master = state[i]["master"]
        if p.dtype == torch.bfloat16 and ties == "away":
            expected = ((ours_master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
        else:
            expected = ours_master.to(p.dtype)
        assert torch.equal(p.detach().cpu(), expected), i
        excess = ((ours_master - theirs.detach()).abs() / theirs.detach().abs().clamp(min=1)).max().item()
        assert excess <= 1e-6, f"master {i} differs by {excess:.3g}"


def python(code: str, **environment: str) -> subprocess.Popen[str]:
    """A fresh interpreter that runs ``code``; the tests' folder is importable there."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
