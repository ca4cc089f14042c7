"""What wrap() refuses: the exception names the culprit, and nothing was changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import trainstream
from models import Mlp, adamw, step
from trainstream import ConfigError, ParameterError


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
    """Everything that wrap() could change."""
    return (
        [
            (name, id(p), p.device, type(p), p.grad, bool(p._post_accumulate_grad_hooks), bool(p._backward_hooks))
            for name, p in model.named_parameters()
        ],
        [p.detach().contiguous().view(torch.uint8).tolist() for p in model.parameters() if not p.is_meta and p.dim()],
        [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()],
        repr(optimizer.state_dict()) if optimizer is not None else None,
    )


def refused(model: nn.Module, optimizer: Any, error: type[Exception], *words: str, **options: Any) -> None:
    """wrap() raises this error with these words and changes nothing."""
    plain = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    before = snapshot(model, plain)
    with pytest.raises(error) as raised:
        trainstream.wrap(model, optimizer, **options)
    assert isinstance(raised.value, trainstream.TrainStreamError)
    for word in words:
        assert word in str(raised.value), raised.value
    assert snapshot(model, plain) == before


class Subclass(torch.Tensor):
    """A tensor subclass."""


def strided() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 8)[:, :4])


BAD_PARAMETERS = {
    "float64": (lambda: nn.Parameter(torch.randn(3).double()), "float64"),
    "complex64": (lambda: nn.Parameter(torch.randn(3, dtype=torch.complex64)), "complex64"),
    "meta": (lambda: nn.Parameter(torch.empty(3, device="meta")), "meta"),
    "sliced": (strided, "strides"),
    "expanded": (lambda: nn.Parameter(torch.randn(1, 4).expand(3, 4)), "strides"),
    "subclass": (lambda: nn.Parameter(torch.randn(3).as_subclass(Subclass)), "Subclass"),
}


@pytest.mark.parametrize("make, word", BAD_PARAMETERS.values(), ids=BAD_PARAMETERS.keys())
def test_parameter_that_cannot_be_trained(make: Any, word: str) -> None:
    """Each kind of parameter that the engine cannot train is refused by its name."""
    model = Mlp(5, 2)
    model.layers[1].odd = make()
    refused(model, adamw(model.parameters()), ParameterError, "layers.1.odd", word)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_frozen_parameter_may_be_of_any_kind(dtype: torch.dtype) -> None:
    """What is not trained is not refused, and keeps its bytes."""
    model = Mlp(5, 2)
    model.odd = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)
    model, optimizer = trainstream.wrap(model, adamw(model.parameters()))
    step(model, optimizer)
    assert torch.equal(model.odd, torch.ones(3, dtype=dtype))


def test_sparse_gradient() -> None:
    """A sparse gradient is refused by the parameter's name, before any weight changes."""
    model = nn.Embedding(7, 3, sparse=True)
    before = model.weight.detach().clone()
    model, optimizer = trainstream.wrap(model, adamw(model.parameters()))
    with pytest.raises(ParameterError, match=r"weight.*sparse"):
        model(torch.tensor([1])).sum().backward()
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_nothing_to_train() -> None:
    """A model without parameters, and one with frozen ones only, are refused."""
    refused(nn.Sequential(), None, ParameterError, "nothing to train")
    model = Mlp(5, 2).requires_grad_(False)
    refused(model, adamw(model.parameters()), ParameterError, "nothing to train")
    refused(model, None, ParameterError, "nothing to train")


OPTIONS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"speed": 3}, ("speed=3", "threads")),
    ({"param_offload": True}, ("param_offload=True", "False")),
    ({"max_grad_norm": 0.0}, ("max_grad_norm=0.0", "above 0")),
    ({"max_grad_norm": float("nan")}, ("max_grad_norm=nan", "above 0")),
    ({"max_grad_norm": "1"}, ("max_grad_norm='1'", "above 0")),
    ({"max_grad_norm": True}, ("max_grad_norm=True", "above 0")),
    ({"eager": 1}, ("eager=1", "True")),
    ({"eager": True, "max_grad_norm": 1.0}, ("max_grad_norm=1.0", "eager=True")),
    ({"profile": "yes"}, ("profile='yes'", "True")),
    ({"accumulation_steps": 0}, ("accumulation_steps=0", "1")),
    ({"accumulation_steps": 2.0}, ("accumulation_steps=2.0", "1")),
    ({"moment_dtype": torch.float16}, ("moment_dtype=torch.float16", "bfloat16")),
    ({"moment_dtype": "int8"}, ("moment_dtype='int8'", "bfloat16")),
    ({"master": "half"}, ("master='half'", "split")),
    ({"master": None}, ("master=None", "split")),
    ({"master": "split"}, ("master='split'", "no parameter is bfloat16")),
    ({"threads": 0}, ("threads=0",)),
    ({"threads": 1.5}, ("threads=1.5",)),
    ({"threads": True}, ("threads=True",)),
    ({"threads": "two"}, ("threads='two'",)),
    ({"pin": "yes"}, ("pin='yes'",)),
    ({"pin": 2}, ("pin=2",)),
    ({"pin": None}, ("pin=None",)),
    ({"max_inflight_bytes": -1}, ("max_inflight_bytes=-1",)),
    ({"max_inflight_bytes": None}, ("max_inflight_bytes=None",)),
    ({"device": "mps"}, ("device='mps'", "cpu")),
    ({"device": "nowhere"}, ("device='nowhere'", "cpu")),
    ({"device": "meta"}, ("device='meta'", "cpu")),
    ({"lr": 0.1}, ("lr=0.1",)),
]


@pytest.mark.parametrize("options, words", OPTIONS, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_option(options: dict[str, Any], words: tuple[str, ...]) -> None:
    """An option that is unknown, of a later version or out of range is refused with its value."""
    model = Mlp(5, 2)
    refused(model, adamw(model.parameters()), ConfigError, *words, **options)


def test_later_options_may_mean_as_today() -> None:
    """Options of later versions are accepted with the values that describe this version."""
    model, _ = trainstream.wrap(Mlp(5, 2), param_offload=False, offload=True, distributed=None)
    trainstream.unwrap(model)


def test_cuda_where_there_is_none() -> None:
    """device="cuda" without a CUDA device is refused, with a device that works."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    model = Mlp(5, 2)
    refused(model, adamw(model.parameters()), ConfigError, "device='cuda'", "cpu", device="cuda")


def test_optimizer_that_is_not_adam() -> None:
    """Other optimizers and subclasses, whose steps would be lost, are refused by their class."""

    class Mine(torch.optim.AdamW):
        pass

    model = Mlp(5, 2)
    refused(model, torch.optim.SGD(model.parameters(), 0.1), ConfigError, "SGD", "AdamW")
    refused(model, Mine(model.parameters()), ConfigError, "Mine", "AdamW")
    refused(model, "adamw", ConfigError, "str", "AdamW")


def test_hyper_parameters() -> None:
    """Values out of range are refused with the group's number."""
    model = Mlp(5, 2)
    for key, value in {"lr": -1.0, "eps": -1.0, "weight_decay": float("nan"), "betas": (1.0, 0.9)}.items():
        optimizer = adamw(model.parameters())
        optimizer.param_groups[0][key] = value
        refused(model, optimizer, ConfigError, key, "group 0")


def test_half_trained_optimizer_is_untouched_by_a_refusal() -> None:
    """A refused wrap() leaves an optimizer that has state as it was."""
    model = Mlp(5, 2)
    optimizer = adamw(model.parameters())
    step(model, optimizer)
    model.zero_grad()
    refused(model, optimizer, ConfigError, "param_offload", param_offload=True)
    assert optimizer.state


def test_state_that_is_refused_leaves_no_hooks() -> None:
    """wrap() with an optimizer whose state does not fit its settings leaves the model to that optimizer."""
    model = Mlp(5, 2)
    optimizer = adamw(model.parameters())
    step(model, optimizer)
    model.zero_grad()
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ParameterError, match="max_exp_avg_sq"):
        trainstream.wrap(model, optimizer)
    optimizer.param_groups[0]["amsgrad"] = False
    model.loss(torch.Generator()).backward()
    assert type(model.head.weight.grad) is torch.Tensor
    optimizer.step()


def test_wrong_order_of_verbs() -> None:
    """Wrapping twice, unwrapping or reporting what is not wrapped are refused, and training goes on."""
    model = Mlp(5, 2)
    for verb in (trainstream.unwrap, trainstream.memory_report):
        with pytest.raises(ConfigError, match="Mlp is not wrapped"):
            verb(model)
    model, optimizer = trainstream.wrap(model, adamw(model.parameters()))
    with pytest.raises(ConfigError, match="wrapped already"):
        trainstream.wrap(model, adamw(model.parameters()))
    with pytest.raises(ConfigError, match="not wrapped"):
        trainstream.unwrap(copy.deepcopy(model))
    step(model, optimizer)
    trainstream.unwrap(model)
    with pytest.raises(ConfigError, match="not wrapped"):
        trainstream.unwrap(model)
    with pytest.raises(ConfigError, match="Module"):
        trainstream.wrap([model], None)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_parameters_on_two_devices() -> None:
    """A model spread over devices is refused by the name of the parameter elsewhere."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    model = Mlp(5, 2)
    model.head.cuda()
    refused(model, adamw(model.parameters()), ParameterError, "head.weight", "one device")
