"""What gradients on the host answer without coming back to the device: their 2-norm, and scaling by a number.

That is what ``clip_grad_norm_`` in all its versions, GradScaler and gradient averaging ask for.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .grads import StreamedGrad

aten = torch.ops.aten
#: What a rule answers if the operation has to be done on the values.
NOT_HERE: Any = object()


def answer(func: Any, args: Any, kwargs: Any) -> Any:
    """The operation's result, or :data:`NOT_HERE`."""
    rule = _RULES.get(func)
    return NOT_HERE if rule is None else rule(*args, **kwargs)


def _norm(grad: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    everything = dim is None or len(dim) == grad.dim()
    if ord != 2 or keepdim or not everything or not _all_live([grad]):
        return NOT_HERE
    return torch.tensor(grad.slot.gradient_norm(), dtype=dtype or grad.dtype, device=grad.device)


def _norms(grads: Any, ord: Any = 2, dtype: torch.dtype | None = None) -> Any:
    if ord != 2 or not _all_live(grads):
        return NOT_HERE
    norms = torch.tensor([grad.slot.gradient_norm() for grad in grads], dtype=dtype or grads[0].dtype)
    return list(norms.to(grads[0].device).unbind())


def _multiply(grad: Any, factor: Any) -> Any:
    return grad if _scale([grad], factor, 1) else NOT_HERE


def _divide(grad: Any, divisor: Any) -> Any:
    return grad if _scale([grad], divisor, -1) else NOT_HERE


def _multiply_all(grads: Any, factor: Any) -> Any:
    return None if _scale(grads, factor, 1) else NOT_HERE


def _divide_all(grads: Any, divisor: Any) -> Any:
    return None if _scale(grads, divisor, -1) else NOT_HERE


def _scale(grads: list[StreamedGrad], by: Any, power: int) -> bool:
    if not _all_live(grads) or not (number := _number(by)):
        return False  # zero and NaN make other values of infinities: that is for the values themselves
    for grad in grads:
        grad.slot.scale *= number**power
    return True


def _all_live(grads: Any) -> bool:
    return all(hasattr(grad, "slot") and grad.is_live() for grad in grads)


_last: tuple[weakref.ref[Tensor], int, float] | None = None


def _number(value: Any) -> float | None:
    """A finite number other than zero. The one tensor that scales many gradients is read once."""
    global _last
    if isinstance(value, Tensor):
        if value.dim() or not value.is_floating_point() or hasattr(value, "slot"):
            return None
        if _last is None or _last[0]() is not value or _last[1] != value._version:
            _last = weakref.ref(value), value._version, value.item()
        value = _last[2]
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if value and math.isfinite(value) else None


_RULES: dict[Any, Callable[..., Any]] = {
    aten.linalg_vector_norm.default: _norm,
    aten._foreach_norm.Scalar: _norms,
    aten.mul_.Tensor: _multiply,
    aten.mul_.Scalar: _multiply,
    aten.div_.Tensor: _divide,
    aten.div_.Scalar: _divide,
    aten._foreach_mul_.Tensor: _multiply_all,
    aten._foreach_mul_.Scalar: _multiply_all,
    aten._foreach_div_.Tensor: _divide_all,
    aten._foreach_div_.Scalar: _divide_all,
}
