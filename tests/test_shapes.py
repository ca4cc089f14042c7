"""Any shape, alignment, instruction set and number of threads gives the same bytes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import trainstream
from models import TOLERANCE, adamw, python

LEVELS = trainstream.build_info()["cpu_available"]
EDGES = [0, 1, 7, 8, 15, 16, 17, 31, 33, 127, 1009]
LARGE = [2**20 - 3, 2**20 - 1, 2**20, 2**20 + 3, 1_299_709]
shapes = st.one_of(
    st.lists(st.integers(0, 9), max_size=5).map(tuple),
    st.tuples(st.sampled_from(EDGES)),
    st.tuples(st.sampled_from(EDGES), st.integers(1, 3)),
)


def update(shape: tuple[int, ...], dtype: torch.dtype, offset: int, threads: int, steps: int, **layout: str) -> Any:
    """Updates of a parameter that starts ``offset`` elements into its memory."""
    generator = torch.Generator().manual_seed(7)
    count = torch.Size(shape).numel()
    memory = torch.randn(count + offset, generator=generator).to(dtype)
    model = nn.Module()
    model.weight = nn.Parameter(memory[offset:].view(shape))
    model, ours = trainstream.wrap(model, adamw(model.parameters()), threads=threads, **layout)
    for _ in range(steps):
        model.weight.grad = torch.randn(shape, generator=generator).to(dtype)
        ours.step()
    state = ours.state_dict()["state"][0]
    _, _ = trainstream.unwrap(model)
    return [model.weight.detach(), *(state[name] for name in sorted(state) if name != "step")]


def bits(tensors: Any) -> list[Any]:
    return [t.contiguous().view(torch.uint8) if t.dim() else t.item() for t in tensors]


def same(got: Any, expected: Any) -> bool:
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(got, expected, strict=True))


@given(
    shape=shapes,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    offset=st.sampled_from([0, 1, 3, 7]),
    threads=st.sampled_from([1, 2, 7]),
    moment_dtype=st.sampled_from(["float32", "bfloat16"]),
    master=st.sampled_from(["float32", "split", "none"]),
)
@settings(max_examples=60, deadline=None)
@example((2**20 + 3,), torch.float32, 1, 7, "float32", "float32")
@example((2**20 + 3,), torch.bfloat16, 3, 7, "bfloat16", "none")
@example((1_299_709,), torch.bfloat16, 1, 2, "bfloat16", "split")
def test_levels_and_threads_agree(
    shape: tuple[int, ...], dtype: torch.dtype, offset: int, threads: int, moment_dtype: str, master: str
) -> None:
    """B25: ranks 0 to 5, sizes around vectors and pieces, misaligned weights: the bytes of one scalar thread."""
    layout = {"moment_dtype": moment_dtype, "master": master if dtype == torch.bfloat16 else "float32"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINSTREAM_CPU", "scalar")
        expected = bits(update(shape, dtype, offset, 1, 2, **layout))
        for level in LEVELS:
            patch.setenv("TRAINSTREAM_CPU", level)
            assert same(bits(update(shape, dtype, offset, threads, 2, **layout)), expected), level


@pytest.mark.parametrize("count", [1, 7, 8, 15, 16, 17, *LARGE])
@pytest.mark.parametrize("level", LEVELS)
def test_every_element_is_updated_as_in_torch(count: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B25: after 20 steps (3 for large ones) each element is within 3e-7 of torch.optim.AdamW."""
    monkeypatch.setenv("TRAINSTREAM_CPU", level)
    steps = 20 if count < 1000 else 3
    generator = torch.Generator().manual_seed(7)
    weight = nn.Parameter(torch.randn(count + 1, generator=generator)[1:].clone())
    plain = adamw([weight])
    for _ in range(steps):
        weight.grad = torch.randn(count, generator=generator)
        plain.step()
    got = update((count,), torch.float32, 1, 2, steps)[0]
    assert ((got - weight.detach()).abs() / weight.detach().abs().clamp(min=1)).max() <= TOLERANCE


def threads() -> int:
    model, _ = trainstream.wrap(nn.Linear(3, 3))
    count: int = trainstream.memory_report(model)["threads"]
    trainstream.unwrap(model)
    return count


def test_threads_are_this_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """B52: the CPUs of this process are shared with the ranks beside it, unless the user says how many."""
    monkeypatch.delenv("TRAINSTREAM_NUM_THREADS", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    cpus = threads()
    assert 1 <= cpus <= len(os.sched_getaffinity(0))
    for ranks in (2, 4, 1000):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert threads() == max(1, cpus // ranks)
    monkeypatch.setenv("TRAINSTREAM_NUM_THREADS", "3")
    assert threads() == 3


BOUND = """
import os
from test_shapes import threads

free = threads()
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
print(free, threads())
"""


def test_threads_follow_the_affinity_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """B52: a process bound to one CPU has one thread; a launcher's OMP_NUM_THREADS=1 changes nothing."""
    monkeypatch.delenv("TRAINSTREAM_NUM_THREADS", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    out, _ = python(BOUND, OMP_NUM_THREADS="1").communicate(timeout=120)
    assert out.split() == [str(threads()), "1"]
