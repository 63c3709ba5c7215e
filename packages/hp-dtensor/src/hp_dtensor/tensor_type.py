"""What a framework's adapter tells of its DTensors, for those who carry out their operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hp_dtensor.spec import Spec

Tensor = Any


@dataclass(frozen=True)
class TensorType:
    """The DTensors of a framework."""

    dtensor: Any
    """Their class."""
    plain: Any
    """The class of the framework's own tensors."""
    wrap: Callable[[Tensor, Spec], Any]
    """``wrap(local, spec)``: the DTensor of a local tensor."""
    write: Callable[[Tensor, Tensor], Any] | None
    """``write(local, value)``: writes a value into a local tensor, recorded for backward.

    None where the framework cannot record that: then in-place operations on what requires grad are refused, and their in-place
    kernels are never called.
    """
