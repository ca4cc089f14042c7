"""Train a small character-level GPT on Python's own help text, through trainstream.

    python examples/train_text.py                   # the GPU if there is one, else the host device
    python examples/train_text.py --compare         # then once more with plain torch.optim.AdamW

The text ships with the standard library (the pages behind `help("topics")`), so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import trainstream

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TAIL = 20  # the final loss is the mean of this many last steps
BYTE_ROWS = {
    "device_weight_bytes": "weights on the device",
    "host_master_bytes": "fp32 master weights, host",
    "host_moment_bytes": "AdamW moments, host",
    "host_gradient_bytes": "gradients, host",
    "host_staging_bytes": "staging, host",
    "pinned_bytes": "host memory, pinned",
    "pageable_bytes": "host memory, pageable",
}
SECOND_ROWS = {
    "update": "AdamW on host threads",
    "wait_gradients": "waiting for gradients",
    "wait_update": "waiting for the update",
}


class Corpus:
    """The text as character ids, and random windows of it."""

    def __init__(self) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        self.alphabet = sorted(set(text))
        self.ids = self.encode(text)

    def encode(self, text: str) -> Tensor:
        index = {char: i for i, char in enumerate(self.alphabet)}
        return torch.tensor([index[char] for char in text])

    def batch(self, size: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.ids) - context - 1, (size, 1), generator=generator)
        windows = self.ids[starts + torch.arange(context + 1)]
        return windows[:, :-1], windows[:, 1:]

    def decode(self, ids: Tensor) -> str:
        return "".join(self.alphabet[i] for i in ids.tolist())


class Block(nn.Module):
    """Causal attention and an MLP, both behind a layer norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 32 if width <= 512 else width // 128)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        mlp: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + mlp


class CharGPT(nn.Module):
    """A decoder-only transformer over characters."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        blocks = [Block(width) for _ in range(layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.apply(self._init)
        for block in blocks:  # keep the residual stream's variance independent of depth
            for last in (block.out, block.down):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * layers))

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass
class Run:
    """The figures of one training run."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    peak_vram_bytes: int = 0
    peak_rss_bytes: int = 0

    @property
    def final_loss(self) -> float:
        tail = self.losses[-TAIL:]
        return sum(tail) / len(tail)


def build(args: argparse.Namespace, corpus: Corpus) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model for the same seed, and its ordinary optimizer."""
    torch.manual_seed(args.seed)
    model = CharGPT(len(corpus.alphabet), args.context, args.width, args.layers).to(DTYPES[args.dtype])
    return model, torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """A short linear warmup, then a cosine down to a tenth of the peak."""
    warmup = max(1, min(40, steps // 10))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def train(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, corpus: Corpus, args: argparse.Namespace
) -> Run:
    """An ordinary PyTorch loop: nothing in it knows about trainstream."""
    run = Run(name)
    generator = torch.Generator().manual_seed(args.seed)
    on_gpu = args.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    model.train()
    started = time.perf_counter()
    with tqdm(range(args.steps), desc=name, unit="step", disable=args.quiet) as bar:
        for step in bar:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args.steps, args.lr)
            inputs, targets = (t.to(args.device) for t in corpus.batch(args.batch, args.context, generator))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
            loss.backward()
            optimizer.step()
            run.losses.append(loss.item())
            speed = (step + 1) * inputs.numel() / (time.perf_counter() - started)
            bar.set_postfix_str(f"loss {run.losses[-1]:.3f}, {speed:,.0f} tokens/s", refresh=False)
    if isinstance(optimizer, trainstream.OffloadAdamW):
        optimizer.synchronize()
    if on_gpu:
        torch.cuda.synchronize()
        run.peak_vram_bytes = torch.cuda.max_memory_allocated()
    run.seconds = time.perf_counter() - started
    run.tokens_per_second = args.steps * args.batch * args.context / run.seconds
    unit = 1 if sys.platform == "darwin" else 1024
    run.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return run


@torch.no_grad()
def generate(model: nn.Module, corpus: Corpus, args: argparse.Namespace, length: int = 300) -> str:
    """Samples from the model, continuing a few words."""
    model.eval()
    generator = torch.Generator().manual_seed(args.seed)
    ids = corpus.encode("The statement ")[None]
    for _ in range(length):
        logits = model(ids[:, -args.context :].to(args.device))[:, -1].float().cpu()
        ids = torch.cat([ids, torch.multinomial((logits / 0.6).softmax(-1), 1, generator=generator)], dim=1)
    return corpus.decode(ids[0])


def table(report: dict[str, Any], run: Run) -> str:
    """Where each byte lives, and where the time went."""
    lines = [f"{report['params']:,} parameters on {report['device']}, {report['threads']} threads ({report['cpu']})"]
    lines += [f"  {label:<28}{report[key] / 2**20:>12,.2f} MiB" for key, label in BYTE_ROWS.items()]
    if run.peak_vram_bytes:
        lines.append(f"  {'peak GPU memory':<28}{run.peak_vram_bytes / 2**20:>12,.2f} MiB")
    lines.append(f"  {'peak process memory':<28}{run.peak_rss_bytes / 2**20:>12,.2f} MiB")
    lines += [f"  {label:<28}{report['seconds'][key]:>12,.2f} s" for key, label in SECOND_ROWS.items()]
    lines.append(f"  {'the whole run':<28}{run.seconds:>12,.2f} s")
    return "\n".join(lines)


def plot(runs: list[Run], path: Path) -> None:
    """Writes the loss curve, or says why there is none."""
    try:
        import matplotlib
    except ImportError:
        print("no loss curve: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for run, style in zip(runs, ("-", "--"), strict=False):
        axes.plot(run.losses, style, label=f"{run.name}, {run.tokens_per_second:,.0f} tokens/s", linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss, nats per character")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"loss curve: {path}")


def compare(ours: dict[str, Tensor], corpus: Corpus, args: argparse.Namespace) -> tuple[Run, float]:
    """The same seed and batches through plain AdamW, and the largest parameter difference."""
    model, optimizer = build(args, corpus)
    model.to(args.device)
    run = train("torch.optim.AdamW", model, optimizer, corpus, args)
    difference = max((p.detach().cpu() - ours[name]).abs().max().item() for name, p in model.named_parameters())
    return run, difference


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a character-level GPT on Python's help text.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--moment-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--master", choices=("float32", "split", "none"), default="float32")
    parser.add_argument("--compare", action="store_true", help="train again with plain torch.optim.AdamW")
    parser.add_argument("--out", type=Path, default=Path("out/train_text.png"), help="where the loss curve goes")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def main() -> None:
    args = parse()
    corpus = Corpus()
    model, optimizer = build(args, corpus)
    options = dict(moment_dtype=args.moment_dtype, master=args.master)
    model, optimizer = trainstream.wrap(model, optimizer, device=args.device, **options)  # the one line
    run = train("trainstream", model, optimizer, corpus, args)
    report = trainstream.memory_report(model)

    print(f"\n{table(report, run)}\n\n--- a sample ---\n{generate(model, corpus, args)}\n---\n")
    tail = min(TAIL, args.steps)
    print(f"final loss {run.final_loss:.3f} nats/char (last {tail} steps), {run.tokens_per_second:,.0f} tokens/s")
    runs, figures = [run], {"settings": vars(args), "report": report}
    if args.compare:
        weights = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
        del model, optimizer  # so that the plain run has the whole device
        gc.collect()
        plain, figures["largest_difference"] = compare(weights, corpus, args)
        runs.append(plain)
        print(f"plain AdamW {plain.final_loss:.3f} nats/char, {plain.tokens_per_second:,.0f} tokens/s")
        print(f"largest parameter difference after {args.steps} steps: {figures['largest_difference']:.3g}")
    plot(runs, args.out)
    if args.json:
        figures["runs"] = [asdict(r) | {"final_loss": r.final_loss} for r in runs]
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
