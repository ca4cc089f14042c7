"""Where the step went: the table of exposed time, and the exported trace."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import trainstream
from models import Mlp, adamw, train
from trainstream import ConfigError
from trainstream.profiling import exposed


def wrapped(device: str, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = Mlp().to(device)
    return trainstream.wrap(model, adamw(model.parameters()), **options)


def test_exposed_time_is_what_the_worker_did_meanwhile() -> None:
    """A wait for an update is divided by what the worker did then; the rest of it is the way back."""
    spans = [
        ("step", "caller", 0.0, 1.0),
        ("forward", "caller", 1.0, 5.0),
        ("wait_update", "caller", 1.0, 4.0),
        ("wait_gradients", "worker", 0.5, 1.5),
        ("update", "worker", 1.5, 3.5),
        ("backward", "caller", 5.0, 8.0),
        ("wait_inflight", "caller", 6.0, 6.5),
        ("update", "worker", 6.0, 7.0),  # hidden behind the backward
        ("step", "caller", 8.0, 9.0),
        ("forward", "caller", 9.0, 99.0),  # of a step that did not end
    ]
    assert exposed(spans) == pytest.approx(
        {
            "steps": 1,
            "total": 8.0,
            "forward": 4.0,
            "backward": 3.0,
            "step": 1.0,
            "wait_gradients": 0.5,
            "update": 2.0,
            "upload": 0.5,
            "wait_inflight": 0.5,
        }
    )
    assert exposed(spans[:1]) == {"steps": 0}


def test_phases_make_up_the_step(device: str) -> None:
    """Forward, backward and step() follow each other without a gap, and waits lie within them."""
    model, ours = wrapped(device, profile=True, max_grad_norm=1.0)
    train(model, ours, 6)
    seconds = exposed(ours.engine.spans())
    assert seconds["steps"] == 5
    assert seconds["forward"] + seconds["backward"] + seconds["step"] == pytest.approx(seconds["total"], rel=0.05)
    waits = ("update", "accumulate", "wait_gradients", "upload", "wait_inflight")
    assert 0 <= sum(seconds.get(name, 0.0) for name in waits) <= seconds["total"]
    report = trainstream.report(model)
    assert "mean of 5 steps" in report and "host_moment_bytes" in report


def test_exported_trace_opens(device: str, tmp_path: Path) -> None:
    """The trace is Chrome's JSON: named rows, spans that do not overlap within one, all the copies of each step."""
    model, ours = wrapped(device, profile=True)
    train(model, ours, 3)
    ours.synchronize()
    ours.export_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {e["tid"] for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["tid"] for e in spans} == named
    assert all(e["dur"] >= 0 for e in spans)
    names = [e["name"] for e in spans]
    parameters = len(list(model.parameters()))
    assert names.count("gradient") == names.count("weight") == 3 * parameters
    assert {"step", "forward", "backward", "update"} <= set(names)
    for tid in named:
        row = sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == tid and e["name"] in ("gradient", "weight")
        )
        assert all(end <= start + 1e-3 for (_, end), (start, _) in itertools.pairwise(row))


def test_nothing_is_recorded_unasked(device: str, tmp_path: Path) -> None:
    """Without profile=True there are no spans, and asking for the trace is refused."""
    model, ours = wrapped(device)
    train(model, ours, 3)
    assert ours.engine.spans() == []
    assert "profile=True" in trainstream.report(model)
    with pytest.raises(ConfigError, match="profile=False"):
        ours.export_chrome_trace(tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()
