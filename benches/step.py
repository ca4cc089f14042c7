"""Step time and memory of a GPT, resident and offloaded, in one run.

    python benches/step.py --layers 34 --width 2048 --heads 16 --batch 8     # 1.84 B parameters, needs 36 GiB

Each arm runs in a process of its own, on the same seed and batch; the losses must agree to 1e-3. fp32 weights
under bf16 autocast, AdamW with betas (0.9, 0.95) and decay 0.1. The time is the median after the third step.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ARMS = ("resident", "trainstream")
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


def measure(arm: str, args: argparse.Namespace) -> dict[str, object]:
    """Trains ``args.steps`` steps and returns the figures of this arm."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model: nn.Module = Gpt(args.layers, args.width, args.heads)
    settings = dict(lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), fused=True, **settings)
    if arm == "trainstream":
        import trainstream

        model, optimizer = trainstream.wrap(model, optimizer)
    tokens = torch.randint(0, VOCABULARY, (args.batch, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(device)
    losses, seconds = [], []
    for _ in range(args.steps):
        started = time.perf_counter()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {
        "arm": arm,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_step": args.batch * CONTEXT,
        "seconds": statistics.median(seconds[3:]),
        "peak_vram_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0,
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Step time and memory of a GPT, resident and offloaded.")
    for name, default in (("layers", 4), ("width", 256), ("heads", 8), ("batch", 2), ("steps", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--arm", choices=ARMS, help="run one arm and print it as JSON")
    args = parser.parse_args()
    if args.steps < 5:
        parser.error("--steps must be at least 5")
    if args.arm:
        print(json.dumps(measure(args.arm, args)))
        return
    rows = []
    for arm in ARMS:
        out = subprocess.run([sys.executable, *sys.argv, "--arm", arm], check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(out.stdout.splitlines()[-1]))
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{name}, {rows[0]['parameters']:,} parameters, {rows[0]['tokens_per_step']:,} tokens per step")
    for row in rows:
        share = rows[0]["seconds"] / row["seconds"]
        print(
            f"{row['arm']:<12} {row['seconds']:.3f} s/step ({share:.0%} of resident), "
            f"{row['peak_vram_gib']:.1f} GiB GPU, {row['peak_rss_gib']:.1f} GiB RAM"
        )
    apart = max(abs(a - b) for a, b in zip(rows[0]["losses"], rows[1]["losses"], strict=True))
    print(f"largest loss difference {apart:.1e}")
    if not apart <= 1e-3:
        raise SystemExit("the arms disagree: no figure above counts")


if __name__ == "__main__":
    main()
