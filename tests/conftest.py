"""Fixtures shared by all tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for models.py, whatever the import mode


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The device that holds the weights: the host device, and a GPU where there is one."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return request.param


@pytest.fixture(autouse=True)
def _exact_arithmetic() -> None:
    # TF32 would make the same model give other gradients after a difference in the last bit of a weight.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the models are small, and update threads need the cores
