"""Where the step went: a table of exposed time by cause, and a trace for https://ui.perfetto.dev."""

from __future__ import annotations

import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, TypeAlias

#: name, lane, start and end in seconds
Span: TypeAlias = tuple[str, str, float, float]

_LANES = {
    "caller": "training thread",
    "worker": "host optimizer",
    "out": "copies to the host",
    "in": "copies to the device",
}
_PHASES = {"forward": "forward, and all else", "backward": "backward, from its first gradient", "step": "step()"}
_CAUSES = {
    "update": "the optimizer's arithmetic",
    "accumulate": "adding gradients and their norm",
    "wait_gradients": "gradients on their way to the host",
    "upload": "weights on their way back, and all else",
    "wait_inflight": "too many gradients on their way (max_inflight_bytes)",
}


class Phases:
    """Records what the training thread does between its calls."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._phase, self._since = engine, "", 0.0

    def enter(self, phase: str, now: float) -> None:
        """``phase`` begins, and the one before ends."""
        if self._phase and phase != self._phase:
            self._engine.add_span(self._phase, now - self._since)
        if phase != self._phase:
            self._phase, self._since = phase, now


def write_chrome_trace(spans: Iterable[Span], path: str | os.PathLike[str]) -> None:
    """Writes the spans as Chrome trace events."""
    events: list[dict[str, Any]] = []
    ends: dict[int, float] = {}  # of the rows in use
    for name, lane, start, end in sorted(spans, key=lambda s: s[2]):
        tid = list(_LANES).index(lane)
        if lane in ("out", "in"):  # copies overlap: as many rows as it takes
            tid = next(row for row in itertools.count(tid, len(_LANES)) if ends.get(row, 0.0) <= start)
        if tid not in ends:
            events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": _LANES[lane]}})
        ends[tid] = end
        events.append({"ph": "X", "name": name, "pid": 0, "tid": tid, "ts": start * 1e6, "dur": (end - start) * 1e6})
    with open(path, "w") as file:  # noqa: PTH123
        json.dump({"traceEvents": events}, file)


def exposed(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds per step, from the end of the first ``step()`` to the end of the last.

    Returns:
        ``steps`` (their number), ``total``, the phases ``forward``, ``backward``, ``step``, and what the training
        thread waited for within them: ``update``, ``accumulate``, ``wait_gradients``, ``upload``, ``wait_inflight``.
    """
    spans = list(spans)
    ends = [end for name, _, _, end in spans if name == "step"]
    if len(ends) < 2:
        return {"steps": 0}
    first, last = ends[0], ends[-1]
    seconds: dict[str, float] = defaultdict(float)
    working = sorted((s for s in spans if s[1] == "worker"), key=lambda s: s[2])
    for name, lane, start, end in spans:
        if lane != "caller" or start < first - 1e-9 or end > last + 1e-9:
            continue
        if name != "wait_update":
            seconds[name] += end - start
            continue
        seconds["upload"] += end - start
        for cause, _, begun, over in working:
            if begun >= end:
                break
            overlap = min(end, over) - max(start, begun)
            if overlap > 0:
                seconds[cause] += overlap
                seconds["upload"] -= overlap
    steps = len(ends) - 1
    return {"steps": steps, "total": (last - first) / steps, **{name: s / steps for name, s in seconds.items()}}


def table(spans: Iterable[Span]) -> str:
    """:func:`exposed` for people."""
    seconds = exposed(spans)
    if not seconds["steps"]:
        return "no step measured yet: train at least two with profile=True"

    def row(label: str, key: str) -> str:
        value = seconds.get(key, 0.0)
        return f"  {label:<56}{value * 1e3:>10.2f} ms{value / seconds['total']:>8.1%}"

    return "\n".join(
        [
            f"mean of {seconds['steps']} steps",
            row("one step", "total"),
            *(row(label, key) for key, label in _PHASES.items()),
            "of this the training thread waited for",
            *(row(label, key) for key, label in _CAUSES.items()),
        ]
    )
