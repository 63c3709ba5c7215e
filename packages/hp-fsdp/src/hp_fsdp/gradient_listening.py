"""Who is told that a backward has added to the gradient of a whole parameter."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from hp_fsdp.wide_gradients import WideGradient
from hp_platform.protocols.tensor import Tensor


class Listener(Protocol):
    """Whoever wants to know of gradients of whole parameters."""

    def gradient_came(self) -> None:
        """A backward has added to one."""
        ...


def told_of_gradients(listener: Listener, wide: WideGradient | None) -> Callable[[Tensor], None]:
    """The hook of a whole parameter that tells ``listener``; ``wide``: what takes its gradient before, if that comes wide."""
    # Weakly: a framework may hold hooks where no collector of cycles sees them, and with them the whole model.
    listening = weakref.ref(listener)

    def came(_: Tensor) -> None:
        found = listening()
        if found is not None:
            found.gradient_came()

    if wide is None:
        return came

    def wide_one_came(x: Tensor) -> None:
        wide.accept()
        came(x)

    return wide_one_came
