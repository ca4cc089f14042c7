"""``p.grad`` after a gradient has left the device: the same shape, dtype and device, and no storage."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from . import lazy

if TYPE_CHECKING:
    from .slots import Slot

aten = torch.ops.aten


class StreamedGrad(Tensor):
    """A gradient in host memory that still answers as ``p.grad``.

    Any operation works: it brings the values to the parameter's device, runs there, and what it changed in
    place is written back to the host. Norms, scaling and a further backward are done on the host instead. An
    operation that makes a view (``p.grad[0]``, ``p.grad.detach()``) puts a plain tensor back into ``p.grad``,
    so that writes through the view count; ``step()`` takes that tensor.

    Raises:
        RuntimeError: when used after a later backward has replaced it.
    """

    _slot: weakref.ref[Slot]
    #: The plain tensor that took this gradient's place, once there was a view of it.
    returned: Tensor | None

    @staticmethod
    def __new__(cls, slot: Slot) -> StreamedGrad:
        p = slot.param
        self = Tensor._make_wrapper_subclass(
            cls, p.shape, strides=p.stride(), dtype=p.dtype, device=p.device, layout=p.layout
        )
        # Weak: p.grad is a reference that the garbage collector cannot follow.
        self._slot, self.returned = weakref.ref(slot), None
        return self

    @property
    def slot(self) -> Slot:
        """The parameter's slot."""
        if (slot := self._slot()) is None:
            raise RuntimeError("this gradient's optimizer is gone, and the gradient with it")
        return slot

    def materialize(self) -> Tensor:
        """A plain tensor with this gradient's values, on the parameter's device."""
        if self.returned is not None:
            return self.returned
        if self.slot.grad is not self:
            raise RuntimeError(
                f"the gradient of {self.slot.name} was replaced by a later backward or dropped; clone() it in time"
            )
        return self.slot.read_gradient()

    def is_live(self) -> bool:
        """Whether the values are on the host and nowhere else."""
        return self.returned is None and self.slot.grad is self

    def give_back(self) -> None:
        """Puts a plain tensor in this gradient's place."""
        self.returned = self.materialize()
        if self.slot.param.grad is self:
            self.slot.param.grad = self.returned

    # torch answers these without asking a subclass.
    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.materialize().cpu(*args, **kwargs)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.materialize().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self.materialize().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StreamedGrad({self.materialize()!r})"

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        return self.materialize().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func is aten.add_.Tensor and not kwargs and _is_addend(*args):
            args[0].slot.push_gradient(args[1], add=True)
            return args[0]
        if (result := lazy.answer(func, args, kwargs)) is not lazy.NOT_HERE:
            return result
        if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            tree_map_only(StreamedGrad, StreamedGrad.give_back, (args, kwargs))
        return _run_materialized(func, args, kwargs)


def _is_addend(grad: Any, addend: Any) -> bool:
    """Whether ``grad += addend`` is autograd adding another backward's gradient."""
    return (
        isinstance(grad, StreamedGrad)
        and grad.is_live()
        and isinstance(addend, Tensor)
        and not isinstance(addend, StreamedGrad)
        and addend.layout == torch.strided
        and addend.shape == grad.shape
        and addend.dtype == grad.dtype
        and addend.device == grad.device
    )


def _run_materialized(func: Any, args: Any, kwargs: Any) -> Any:
    values: dict[StreamedGrad, Tensor] = {}

    def value(grad: StreamedGrad) -> Tensor:
        if grad not in values:
            values[grad] = grad.materialize()
        return values[grad]

    out = func(*tree_map_only(StreamedGrad, value, args), **tree_map_only(StreamedGrad, value, kwargs))
    for grad in _written(func, args, kwargs):
        if grad.returned is None:
            grad.slot.write_gradient(values[grad])
    # An in-place operation returns its argument: give back the wrapper, not the copy.
    wrappers = {id(v): g for g, v in values.items()}
    return tree_map_only(Tensor, lambda t: wrappers.get(id(t), t), out)


def _written(func: Any, args: Any, kwargs: Any) -> list[StreamedGrad]:
    """The gradients that the operator's schema says it writes to."""
    written: list[StreamedGrad] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[i] if i < len(args) else kwargs.get(argument.name)
        tree_map_only(StreamedGrad, written.append, given)
    return written
