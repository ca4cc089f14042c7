"""What hangs on a parameter. It holds us weakly: torch does not look for cycles through its own memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .optimizer import OffloadAdamW
    from .slots import Slot


def gradient_hook(optimizer: OffloadAdamW, slot: Slot) -> Callable[[Tensor], None]:
    """Sends a gradient away as soon as backward has it."""
    weak_optimizer, weak_slot = weakref.ref(optimizer), weakref.ref(slot)

    def hook(_: Tensor) -> None:
        if (ours := weak_optimizer()) is not None and (arrived := weak_slot()) is not None:
            ours.arrived(arrived)

    return hook


def waiter(optimizer: OffloadAdamW, slot: Slot) -> Callable[[], None]:
    """Waits for the update of a weight that somebody reads."""
    weak_optimizer, weak_slot = weakref.ref(optimizer), weakref.ref(slot)

    def wait() -> None:
        if (ours := weak_optimizer()) is not None and (waited := weak_slot()) is not None:
            ours._guard_wait(waited)

    return wait
