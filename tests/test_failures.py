"""Failures of copies, workers and page-locking, and the end of the process."""

from __future__ import annotations

import signal
from typing import Any

import pytest

import trainstream
from models import Mlp, adamw, assert_close, python, step, train, twins
from trainstream.bridge import inject

SECONDS = 20
PRELUDE = """
import os, signal, sys, threading, time
import torch

import trainstream
from models import Mlp, adamw, step
from trainstream.bridge import inject

torch.set_num_threads(1)
torch.manual_seed(0)
def build():
    model = Mlp(64)
    return trainstream.wrap(model, adamw(model.parameters()))
"""


def failing(**faults: Any) -> tuple[Any, Any]:
    """A wrapped model on a device with these faults."""
    model = Mlp()
    with inject(**faults):
        return trainstream.wrap(model, adamw(model.parameters()))


def until_it_raises(model: Any, optimizer: Any) -> None:
    """A step and a backward after it, then a wait."""
    step(model, optimizer)
    step(model, optimizer, 1)
    optimizer.synchronize()


@pytest.mark.parametrize("number", [8, 9, 12, 15, 16, 19])  # 0 to 7 copy the weights at wrap
def test_failing_copy(number: int) -> None:
    """A failing copy raises DeviceError at the latest in synchronize(), again later, and state_dict() still works."""
    model, optimizer = failing(fail_copy=number)
    with pytest.raises(trainstream.DeviceError):
        until_it_raises(model, optimizer)
    with pytest.raises(trainstream.DeviceError):
        optimizer.step()
    assert set(optimizer.state_dict()) == {"state", "param_groups"}


@pytest.mark.parametrize("number", [0, 7])
def test_failing_copy_in_wrap(number: int) -> None:
    """A copy that fails in wrap() raises DeviceError there, and the model can be wrapped again."""
    model = Mlp()
    optimizer = adamw(model.parameters())
    with inject(fail_copy=number), pytest.raises(trainstream.DeviceError):
        trainstream.wrap(model, optimizer)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    model, ours = trainstream.wrap(model, optimizer)
    step(model, ours)


@pytest.mark.parametrize("number", [0, 1])
def test_panic_in_a_worker(number: int) -> None:
    """A panic in an update thread raises InternalError at the latest in synchronize(), and the state can be saved."""
    model, optimizer = failing(panic_job=number)
    with pytest.raises(trainstream.InternalError, match="injected panic"):
        until_it_raises(model, optimizer)
    with pytest.raises(trainstream.InternalError):
        optimizer.step()
    assert set(optimizer.state_dict()) == {"state", "param_groups"}


def test_load_after_a_failure_raises() -> None:
    """load_state_dict() on a stopped engine raises what stopped it."""
    model, optimizer = failing(panic_job=0)
    state = optimizer.state_dict()
    with pytest.raises(trainstream.InternalError):
        until_it_raises(model, optimizer)
    with pytest.raises(trainstream.InternalError):
        optimizer.load_state_dict(state)


def test_one_failure_leaves_other_engines_alone() -> None:
    """A second model trains on after the first one's engine has stopped."""
    model, optimizer = failing(panic_job=0)
    reference, plain, other, ours = twins(Mlp)
    with pytest.raises(trainstream.InternalError):
        until_it_raises(model, optimizer)
    train(reference, plain, 3)
    train(other, ours, 3)
    assert_close(other, reference)


def test_refused_pinning_raises_when_asked_for() -> None:
    """pin=True on a system that refuses to page-lock raises PinError before anything is changed."""
    model = Mlp()
    with inject(pin_limit=4096), pytest.raises(trainstream.PinError):
        trainstream.wrap(model, adamw(model.parameters()), pin=True)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_refused_pinning_falls_back() -> None:
    """pin="auto" on such a system says so in the report and trains as torch.optim.AdamW."""
    with inject(pin_limit=4096):
        reference, plain, model, ours = twins(Mlp)
    report = trainstream.memory_report(model)
    assert report["events"] and report["pageable_bytes"] > 0 and report["pinned_bytes"] <= 4096
    train(reference, plain, 5)
    train(model, ours, 5)
    assert_close(model, reference)


EXITS = {
    "right after step": ("model, optimizer = build(); step(model, optimizer)", 0),
    "slow updates in flight": (
        "with inject(seed=1, max_delay_us=20000):\n model, optimizer = build()\nstep(model, optimizer)",
        0,
    ),
    "exception in backward": (
        """
model, optimizer = build()
def bad(grad): raise ValueError("bad")
step(model, optimizer)
model.head.weight.register_hook(bad)
try: step(model, optimizer)
except ValueError: sys.exit(3)""",
        3,
    ),
    "model in a global of another module": ("sys.kept = build(); sys.kept_grad = step(*sys.kept)", 0),
    "sys.exit in a thread": (
        """
def work():
    model, optimizer = build(); step(model, optimizer); sys.exit(5)
thread = threading.Thread(target=work); thread.start(); thread.join()""",
        0,
    ),
    "copy failed": (
        """
with inject(fail_copy=9): model, optimizer = build()
try: step(model, optimizer); optimizer.synchronize()
except trainstream.DeviceError: sys.exit(4)""",
        4,
    ),
    "copy failed unnoticed": (
        "with inject(fail_copy=9): model, optimizer = build()\n"
        "model.head.bias.grad = torch.ones(8); model.head.weight.grad = torch.ones(8, 64)\n"
        "try: optimizer.step()\n"
        "except trainstream.DeviceError: pass",
        0,
    ),
    "os.fork": (
        """
model, optimizer = build(); step(model, optimizer)
pid = os.fork()
if pid == 0:
    try: optimizer.step()
    except trainstream.ClosedError: sys.exit(7)
    sys.exit(8)
status = os.waitpid(pid, 0)[1]
step(model, optimizer); optimizer.synchronize()
sys.exit(os.waitstatus_to_exitcode(status))""",
        7,
    ),
}


@pytest.mark.parametrize("code, expected", EXITS.values(), ids=EXITS.keys())
def test_process_ends_cleanly(code: str, expected: int) -> None:
    """The process ends in time, with the right code and nothing on stderr."""
    process = python(PRELUDE + code)
    try:
        _, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert (process.returncode, errors) == (expected, "")


def test_keyboard_interrupt_during_training() -> None:
    """SIGINT in the training loop arrives as KeyboardInterrupt, and the process ends cleanly."""
    code = """
model, optimizer = build()
try:
    for i in range(10**9):
        step(model, optimizer)
        if i == 3: print("ready", flush=True)
except KeyboardInterrupt:
    sys.exit(6)"""
    process = python(PRELUDE + code)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert (process.returncode, errors) == (6, "")


def test_last_update_is_in_what_atexit_saves() -> None:
    """Weights written in an atexit handler contain the step that was still on its way."""
    code = """
import atexit
torch.set_num_threads(1)
with inject(seed=1, max_delay_us=5000): model, optimizer = build()
before = model.head.bias.detach().clone()
def save(): print(torch.equal(model.head.bias, before), int(optimizer.state_dict()["state"][0]["step"]))
atexit.register(save)
step(model, optimizer)"""
    process = python(PRELUDE + code)
    out, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, out, errors) == (0, "False 1\n", "")
