"""Reads of a weight outside its module wait for its update.

While an update is on its way the parameter's class is :class:`GuardedParameter`; the first operation that
needs its values waits and puts ``nn.Parameter`` back, so that at rest nothing of ours is on the path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

_READ = """shape dtype device layout ndim grad grad_fn requires_grad is_leaf is_cuda is_sparse is_meta is_quantized
    _version names output_nr retains_grad itemsize nbytes""".split()
_CALLED = """size numel dim stride element_size is_contiguous is_floating_point is_complex storage_offset requires_grad_
    register_hook register_post_accumulate_grad_hook get_device nelement ndimension __len__""".split()
_GRAD: Any = Tensor.grad
_REQUIRES_GRAD: Any = Tensor.requires_grad

#: Operations that do not depend on the values.
_METADATA: frozenset[Any] = frozenset(
    [getattr(Tensor, name).__get__ for name in _READ if hasattr(Tensor, name)]
    + [getattr(Tensor, name) for name in _CALLED]
    + [_GRAD.__set__, _GRAD.__delete__, _REQUIRES_GRAD.__set__]
)

_waiters = WeakIdKeyDictionary()  # parameter -> what waits for it


class GuardedParameter(nn.Parameter):
    """A parameter whose update is on its way."""

    def __new__(cls, data: Tensor, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        return nn.Parameter(data, requires_grad)  # what copies and unpickles is at rest

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        wait(self)
        return nn.Parameter.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        wait(self)
        return nn.Parameter.__reduce_ex__(self, protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _METADATA:
            tree_map_only(GuardedParameter, wait, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def wait(param: nn.Parameter) -> None:
    """Waits for the update of a guarded parameter. One whose optimizer is gone has nothing to wait for."""
    _waiters[param]()
    lower_guard(param)


def watch(param: nn.Parameter, waiter: Callable[[], None]) -> None:
    """``waiter`` runs when a guarded ``param`` is read; it must lower the guard."""
    _waiters[param] = waiter


def raise_guard(param: nn.Parameter) -> None:
    """Guards a parameter that is at rest."""
    if type(param) is nn.Parameter:
        param.__class__ = GuardedParameter


def lower_guard(param: nn.Parameter) -> None:
    """Puts the plain class back."""
    if type(param) is GuardedParameter:
        param.__class__ = nn.Parameter  # type: ignore[assignment]
