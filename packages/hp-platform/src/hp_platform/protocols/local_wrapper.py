"""Tensors that wrap a local one: what packages that know nothing of DTensors do with them at the boundaries of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from hp_platform.protocols.tensor import Tensor


class LocalWrapper(Protocol):
    """Implemented by DTensors. The local tensor carries the graph, so it is what is saved, sent or swapped; what comes back is
    wrapped again.
    """

    def __hp_local__(self) -> Tensor:
        """The plain local tensor, the same object each time; no communication."""
        ...

    def __hp_rewrap__(self) -> Callable[[Tensor], Any]:
        """A function from another local tensor of the same shape to what this is around its own. It does not hold this one."""
        ...


def is_local_wrapper(x: Any) -> bool:
    """Whether ``x`` implements :class:`LocalWrapper`. Asked of the class, which is quick."""
    return hasattr(type(x), "__hp_local__")
