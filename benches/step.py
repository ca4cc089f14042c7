"""Step time and memory of a GPT: resident, offloaded by us, and by peers that are installed, in one run.

    python benches/step.py --layers 34 --width 2048 --heads 16 --batch 8     # 1.84 B parameters, needs 36 GiB
    python benches/step.py ... --arms resident,trainstream,bf16-moments --clip 1.0 --png out/step.png

Each arm runs in a process of its own, on the same seed and batch; the losses must agree to 1e-3. fp32 weights
under bf16 autocast, AdamW with betas (0.9, 0.95) and decay 0.1. The time is the median after the third step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Each arm, and what has to be installed for it.
ARMS = {
    "resident": "torch",
    "torchao": "torchao",
    "trainstream": "trainstream",
    "eager": "trainstream",
    "bf16-moments": "trainstream",
}
VOCABULARY, CONTEXT = 32_000, 512


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def offloaded(arm: str, model: nn.Module, args: argparse.Namespace) -> Any:
    """The arm's optimizer."""
    settings: dict[str, Any] = dict(lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    if arm == "torchao":
        from torchao.optim import CPUOffloadOptimizer

        return CPUOffloadOptimizer(
            model.parameters(), torch.optim.AdamW, offload_gradients=not args.clip, fused=True, **settings
        )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **settings)
    if arm == "resident":
        return optimizer
    import trainstream

    moments = "bfloat16" if arm == "bf16-moments" else "float32"
    return trainstream.wrap(model, optimizer, moment_dtype=moments, eager=arm == "eager", profile=args.profile)[1]


def measure(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Trains ``args.steps`` steps and returns the figures of this arm."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model: nn.Module = Gpt(args.layers, args.width, args.heads)
    started = time.perf_counter()
    optimizer = offloaded(arm, model, args)
    setup = time.perf_counter() - started
    tokens = torch.randint(0, VOCABULARY, (args.batch, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(device)
    losses, seconds = [], []
    for _ in range(args.steps):
        started = time.perf_counter()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        if args.clip:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    if args.profile and ARMS[arm] == "trainstream":
        import trainstream

        print(trainstream.report(model), file=sys.stderr)
    return {
        "arm": arm,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_step": args.batch * CONTEXT,
        "clip": args.clip,
        "setup_seconds": setup,
        "seconds": statistics.median(seconds[3:]),
        "peak_vram_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0,
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "losses": losses,
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Step time against GPU memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for row in rows:
        axes.plot(row["peak_vram_gib"], row["seconds"], "o")
        axes.annotate(row["arm"], (row["peak_vram_gib"], row["seconds"]), xytext=(5, 5), textcoords="offset points")
    axes.set(xlabel="peak GPU memory, GiB", ylabel="seconds per step", xlim=(0, None), ylim=(0, None))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Step time and memory of a GPT, resident and offloaded.")
    for name, default in (("layers", 4), ("width", 256), ("heads", 8), ("batch", 2), ("steps", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--arms", default=",".join(ARMS), help="separated by commas")
    parser.add_argument("--clip", type=float, default=0.0, help="torch's clip_grad_norm_ before every step")
    parser.add_argument("--profile", action="store_true", help="show where our steps went")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--png", type=Path, help="draw step time against GPU memory here")
    parser.add_argument("--arm", choices=tuple(ARMS), help="run one arm and print it as JSON")
    args = parser.parse_args()
    if args.steps < 5:
        parser.error("--steps must be at least 5")
    if args.arm:
        print(json.dumps(measure(args.arm, args)))
        return
    rows = []
    for arm in args.arms.split(","):
        if importlib.util.find_spec(ARMS[arm]) is None or (args.clip and arm == "eager"):
            why = "cannot clip" if args.clip and arm == "eager" else f"{ARMS[arm]} is not installed"
            print(f"{arm}: left out, {why}")
            continue
        out = subprocess.run([sys.executable, *sys.argv, "--arm", arm], check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(out.stdout.splitlines()[-1]))
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    clip = f", clipped to {args.clip}" if args.clip else ""
    print(f"{name}, {rows[0]['parameters']:,} parameters, {rows[0]['tokens_per_step']:,} tokens per step{clip}")
    for row in rows:
        row["loss_difference"] = max(abs(a - b) for a, b in zip(rows[0]["losses"], row["losses"], strict=True))
        print(
            f"{row['arm']:<13} {row['seconds']:.3f} s/step ({rows[0]['seconds'] / row['seconds']:.0%} of "
            f"{rows[0]['arm']}), {row['peak_vram_gib']:.1f} GiB GPU, {row['peak_rss_gib']:.1f} GiB RAM, "
            f"ready in {row['setup_seconds']:.1f} s, loss difference {row['loss_difference']:.1e}"
        )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    if args.png:
        plot(rows, args.png)
    if not all(row["loss_difference"] <= 1e-3 for row in rows if row["arm"] != "bf16-moments"):
        raise SystemExit("the arms disagree: no figure above counts")


if __name__ == "__main__":
    main()
