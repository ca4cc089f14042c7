"""The installed package: import, build, environment variables and its own rules."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import trainstream
from models import python

PACKAGE = Path(trainstream.__file__).parent
TRAINING = """
import hashlib, torch, trainstream
from models import Flat, Mlp, adamw, train
torch.set_num_threads(1)
torch.manual_seed(0)
h = hashlib.sha256()
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    model = Mlp(301, 2).to(dtype)
    model, optimizer = trainstream.wrap(model, adamw(model.parameters()))
    train(model, optimizer, 3)
    for p in model.parameters(): h.update(p.detach().view(torch.uint8).numpy().tobytes())
print(trainstream.build_info()["cpu"], optimizer.stats()["threads"], h.hexdigest())
""".replace("Flat, ", "")


def finish(process: object) -> str:
    out, errors = process.communicate(timeout=60)  # type: ignore[attr-defined]
    assert process.returncode == 0, errors  # type: ignore[attr-defined]
    return out


def test_settings_of_placement_change_no_bit() -> None:
    """Instruction sets and thread counts, chosen by environment variables, give the same bits."""
    cpus = trainstream.build_info()["cpu_available"]
    runs = [finish(python(TRAINING)).split()]
    for name in cpus:
        cpu, _, bits = finish(python(TRAINING, TRAINSTREAM_CPU=name)).split()
        assert cpu == name
        runs.append([cpu, "", bits])
    for count in "123":
        _, threads, bits = finish(python(TRAINING, TRAINSTREAM_NUM_THREADS=count)).split()
        assert threads == count
        runs.append(["", threads, bits])
    assert "scalar" in cpus
    assert len({bits for _, _, bits in runs}) == 1, runs


@pytest.mark.parametrize(
    "variable, value", [("TRAINSTREAM_CPU", "mmx"), ("TRAINSTREAM_NUM_THREADS", "0"), ("TRAINSTREAM_NUM_THREADS", "x")]
)
def test_bad_environment_is_refused(variable: str, value: str) -> None:
    """A value that means nothing is a ConfigError that names the variable and the value."""
    code = """
import torch, trainstream
try: trainstream.wrap(torch.nn.Linear(2, 2), None)
except trainstream.ConfigError as e: print(e)"""
    out = finish(python(code, **{variable: value}))
    assert variable in out and value in out


def test_import_without_gpu_or_home(tmp_path: Path) -> None:
    """Import works without a GPU and in a home that cannot be written, and loads no optional package."""
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o500)
    code = """
import sys, torch
before = set(sys.modules)
import trainstream
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(new & {"tqdm", "matplotlib", "transformers", "numpy", "pandas"}), trainstream.__version__)"""
    out = finish(python(code, CUDA_VISIBLE_DEVICES="", HOME=str(home)))
    assert out.split() == ["[]", trainstream.__version__]
    assert list(home.iterdir()) == []


def test_build_info() -> None:
    """build_info() says which build this is, and the version is the package's."""
    info = trainstream.build_info()
    assert {"version", "profile", "features", "cpu", "cpu_available"} <= info.keys()
    assert info["version"] == trainstream.__version__
    assert info["cpu"] in info["cpu_available"]


def test_public_names() -> None:
    """All names in __all__ exist, and every error is a TrainStreamError and a RuntimeError."""
    for name in trainstream.__all__:
        value = getattr(trainstream, name)
        if name.endswith("Error"):
            assert issubclass(value, trainstream.TrainStreamError) and issubclass(value, RuntimeError)
    assert (PACKAGE / "py.typed").exists()


def test_only_the_bridge_reads_addresses_and_streams() -> None:
    """data_ptr, cuda_stream and the compiled Engine appear in no other file than bridge.py."""
    users: dict[str, set[str]] = {}
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in ("data_ptr", "cuda_stream", "Engine"):
                users.setdefault(name, set()).add(path.name)
    assert users == {name: {"bridge.py"} for name in ("data_ptr", "cuda_stream", "Engine")}
