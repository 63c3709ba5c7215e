"""What every DTensor consists of, and nothing that it can do: the foundation of the classes that make up :mod:`dtensor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hp_dtensor.marks import Marks
from hp_dtensor.spec import Spec

Tensor = Any


class DTensorBase:
    """A local tensor, which carries the gradient's graph, and where it lies in the whole."""

    __slots__ = ()

    _local: Tensor
    _spec: Spec
    _marks: Marks | None
    _grad_dtensor: Any
    """The DTensor around the local tensor's gradient, so that ``x.grad is x.grad``."""

    if TYPE_CHECKING:

        @staticmethod
        def _wrap(local: Tensor, spec: Spec) -> Any:
            """The DTensor of a local tensor; the frameworks' classes have it."""

        def redistribute(self, device_mesh: Any = None, placements: Any = None) -> Any:
            """See :class:`hp_dtensor.dtensor.DTensorMethods`."""

        def full_tensor(self) -> Tensor:
            """See :class:`hp_dtensor.dtensor.DTensorMethods`."""

        def numel(self) -> int:
            """See :class:`hp_dtensor.dtensor.DTensorMethods`."""
