"""The host AdamW against torch's and DeepSpeed's, on the jobs that an offloading trainer has.

    python benches/compare_adamw.py                     # 32 Mi parameters, all CPUs
    python benches/compare_adamw.py --level avx2        # with a lower instruction set

Three jobs, each with all arms in turn in every round; times are medians, ratios medians of the rounds' ratios:

* fp32: fp32 weights, gradients and moments;
* bf16 in and out: bf16 gradient, fp32 master and moments, bf16 weight. torch and DeepSpeed have no such step: theirs is
  an fp32 step between two casts. `step + out-cast` leaves out the gradient's cast, as if a GPU had done it;
* all bf16: bf16 weights, gradients and moments, no master.

Ours is the engine's own count of its update seconds in a wrapped model on the host device: the copies before and after
it stand for the bus. DeepSpeed takes part if it is installed and can compile its kernel. At the end each arm's weights
must have moved along the gradient as far as exact AdamW moves them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SETTINGS: dict[str, Any] = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
BF16 = torch.bfloat16
HEAD = 1 << 20  # elements whose movement is checked
#: How far the movement along the gradient may be from that of exact AdamW. Peers with bf16 weights are only shown:
#: rounded to nearest, small steps are lost.
LIMITS = {"fp32": 1e-4, "bf16 in and out": 5e-3, "all bf16": 2e-2}


class Arm:
    """One way to do a job: ``step`` does it once and returns its seconds by charge."""

    def __init__(self, name: str, weight: Tensor, step: Callable[[], dict[str, float]]) -> None:
        self.name, self.weight, self.step = name, weight, step


def timed(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def peers(job: str, weight: Tensor, grad: Tensor) -> list[Arm]:
    """torch's kinds, and DeepSpeed if it works here."""
    kinds: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "torch fused": lambda p: torch.optim.AdamW(p, fused=True, **SETTINGS),
        "torch foreach": lambda p: torch.optim.AdamW(p, foreach=True, **SETTINGS),
        "torch for-loop": lambda p: torch.optim.AdamW(p, foreach=False, **SETTINGS),
    }
    if deepspeed := deepspeed_adam():
        kinds["DeepSpeed CPUAdam"] = lambda p: deepspeed(p, fp32_optimizer_states=job != "all bf16", **SETTINGS)
    return [peer(name, job, make, weight, grad) for name, make in kinds.items()]


def peer(name: str, job: str, make: Callable[..., torch.optim.Optimizer], weight: Tensor, grad: Tensor) -> Arm:
    casts = job == "bf16 in and out"
    master = nn.Parameter(weight.to(BF16 if job == "all bf16" else torch.float32, copy=True))
    out = weight.clone() if casts else master.detach()
    master.grad = torch.empty_like(master) if casts else grad
    optimizer = make([master])

    @torch.no_grad()
    def step() -> dict[str, float]:
        cast_in = timed(lambda: master.grad.copy_(grad)) if casts else 0.0
        seconds = timed(optimizer.step)
        cast_out = timed(lambda: out.copy_(master)) if casts else 0.0
        if not casts:
            return {"": seconds}
        return {"step + out-cast": seconds + cast_out, "with both casts": cast_in + seconds + cast_out}

    return Arm(name, out, step)


def deepspeed_adam() -> Any:
    with contextlib.suppress(Exception), open(os.devnull, "w") as null, contextlib.redirect_stdout(null):  # noqa: PTH123
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        DeepSpeedCPUAdam([nn.Parameter(torch.zeros(8))])  # compiles
        return DeepSpeedCPUAdam
    return None


def ours(name: str, weight: Tensor, grad: Tensor, threads: int, **layout: str) -> Arm:
    import trainstream

    model = nn.Module()
    model.weight = nn.Parameter(weight.clone())
    model, optimizer = trainstream.wrap(
        model, torch.optim.AdamW(model.parameters(), **SETTINGS), threads=threads, **layout
    )

    def step() -> dict[str, float]:
        before = trainstream.memory_report(model)["seconds"]["update"]
        model.weight.grad = grad
        optimizer.step()
        optimizer.synchronize()
        return {"": trainstream.memory_report(model)["seconds"]["update"] - before}

    return Arm(name, model.weight, step)


def movement(weight: Tensor, start: Tensor, grad: Tensor) -> float:
    """The mean movement along the gradient."""
    w, w0, g = (t.detach()[:HEAD].double() for t in (weight, start, grad))
    return ((w0 - w) * g.sign()).mean().item()


def exact_movement(start: Tensor, grad: Tensor, steps: int, rounded: bool) -> float:
    weight = nn.Parameter(start[:HEAD].double())
    weight.grad = grad[:HEAD].double()
    optimizer = torch.optim.AdamW([weight], foreach=False, **SETTINGS)
    for _ in range(steps):
        optimizer.step()
    return movement(weight.to(start.dtype) if rounded else weight, start, grad)


def compare(job: str, arms: list[Arm], start: Tensor, grad: Tensor, rounds: int) -> list[dict[str, Any]]:
    """Prints one table and returns its rows."""
    times: dict[tuple[str, str], list[float]] = {}
    for i in range(rounds + 1):
        for arm in arms:
            time.sleep(0.05)  # OpenMP's threads spin for a while after the arm before
            for charge, seconds in arm.step().items():
                if i:  # the first round makes the state
                    times.setdefault((arm.name, charge), []).append(seconds)
    exact = exact_movement(start, grad, rounds + 1, rounded=job != "all bf16")
    weights = {arm.name: arm.weight for arm in arms}
    mine = [name for name in weights if name.startswith("trainstream")]
    rows = []
    print(f"\n{job}: ns per parameter, the time over that of {', '.join(mine)}, and the movement over the exact one")
    for (name, charge), seconds in times.items():
        moved = movement(weights[name], start, grad) / exact
        ratios = [statistics.median(t / m for t, m in zip(seconds, times[our, ""], strict=True)) for our in mine]
        ns = statistics.median(seconds) * 1e9 / start.numel()
        print(f"  {name:<30}{charge:<16}{ns:>8.3f}", *(f"{r:>6.2f} x" for r in ratios), f"{moved:>9.4f}")
        assert name not in mine or abs(moved - 1) < LIMITS[job], f"{name} computes something else"
        rows.append(dict(job=job, arm=name, charge=charge, ns=ns, movement=moved, ratios=dict(zip(mine, ratios))))  # noqa: B905
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Host AdamW against torch's and DeepSpeed's.")
    parser.add_argument("--parameters", type=int, default=32 << 20)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--level", choices=("scalar", "avx2", "avx512"), help="ours only; the best by default")
    parser.add_argument("--only", default="", help="jobs whose name contains this")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if args.level:
        os.environ["TRAINSTREAM_CPU"] = args.level
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    weight = torch.randn(args.parameters).to(BF16)
    grad = (torch.randn(args.parameters) * 1e-3).to(BF16)

    import trainstream

    level = trainstream.build_info()["cpu"]
    print(f"{args.parameters:,} parameters, {args.threads} threads, {args.rounds} rounds; ours: {level}")
    mine: dict[str, list[tuple[str, dict[str, str]]]] = {
        "fp32": [("(a) fp32", {})],
        "bf16 in and out": [
            ("(a) fp32 master", {}),
            ("(b) bf16 moments", {"moment_dtype": "bfloat16"}),
            ("(c) split master", {"master": "split"}),
        ],
        "all bf16": [("(d) no master", {"master": "none", "moment_dtype": "bfloat16"})],
    }
    rows = []
    for job, layouts in mine.items():
        if args.only not in job:
            continue
        w, g = (weight.float(), grad.float()) if job == "fp32" else (weight, grad)
        arms = peers(job, w, g)
        arms += [ours(f"trainstream {name}", w, g, args.threads, **options) for name, options in layouts]
        rows += compare(job, arms, w, g, args.rounds)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"level": level, "threads": args.threads, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
