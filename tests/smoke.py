"""Three training steps on the host device against torch.optim.AdamW. Needs only torch and the installed package."""

from __future__ import annotations

import torch
from torch import nn

import trainstream

STEPS = 3
TOLERANCE = 1e-6


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        inputs, targets = torch.randn(16, 24, generator=generator), torch.randn(16, 8, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    reference, plain = build()
    start = {name: p.detach().clone() for name, p in reference.named_parameters()}
    expected = train(reference, plain)

    model, optimizer = trainstream.wrap(*build(), device="cpu")
    losses = train(model, optimizer)
    optimizer.synchronize()

    weights = dict(model.named_parameters())
    if weights.keys() != start.keys():
        raise SystemExit(f"smoke failed: the wrapped model has other parameters: {sorted(weights)}")
    for name, p in reference.named_parameters():
        difference = (p - weights[name]).abs().max().item()
        moved = (p - start[name]).abs().max().item()
        if not difference <= TOLERANCE < moved:  # also catches NaN, and a step that did nothing
            raise SystemExit(f"smoke failed: {name} differs by {difference:.3g} after moving {moved:.3g}")
    if not all(abs(a - b) <= 1e-5 for a, b in zip(losses, expected, strict=True)):
        raise SystemExit(f"smoke failed: losses {losses}, expected {expected}")
    if trainstream.memory_report(model)["steps"] != STEPS:
        raise SystemExit("smoke failed: the report counts other steps")
    print(trainstream.build_info())
    print("smoke ok")


if __name__ == "__main__":
    main()
