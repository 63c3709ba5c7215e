"""What is done with the matrices of a group: Newton-Schulz iterations, or a function of the caller's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from hp_optim.muon.coefficients import Coefficients, coefficients_of
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import DType

TRANSFORM = "ns_transform_fn"
"""Key of a group that holds the function, or None."""
TransformFn: TypeAlias = Callable[[Any], Any]
"""See [Note: functions of the caller]."""


@dataclass(frozen=True)
class Iteration:
    """Newton-Schulz. Matrices of one shape and equal kinds are orthogonalised together."""

    coefficients: Coefficients
    steps: int
    dtype: DType
    sent: DType
    """Of what travels to the owner."""

    @property
    def described(self) -> str:
        """What the ranks must have in common, but for the dtype."""
        return f"{self.steps} steps of {self.coefficients.name}"


@dataclass(frozen=True)
class Transform:
    """The same place, of a function of the caller's."""

    function: TransformFn = field(compare=False)
    name: str
    number: int
    """Among the different functions of the optimizer. Ranks compare it, too: which matrices share a kind decides on their order."""
    dtype: DType
    sent: DType

    @property
    def described(self) -> str:
        """Of the function ranks see the name only."""
        return f"function {self.number}, {self.name},"


Kind: TypeAlias = Iteration | Transform


def kind_of(platform: Platform, group: Mapping[str, Any], device: str, functions: list[TransformFn]) -> Kind:
    """That of a group's parameters on ``device``. ``functions``: those of the groups before; a new one is added."""
    given = group["ns_dtype"]
    if given is None:
        given = "bfloat16" if platform.supports("bfloat16_compute", device) else "float32"
    dtype, function = platform.dtype(given), group[TRANSFORM]
    # Before it is normalised, float16 may not hold it.
    sent = platform.dtype("float32") if platform.dtype_name(dtype) == "float16" else dtype
    if function is None:
        return Iteration(coefficients_of(group["ns_coefficients"]), group["ns_steps"], dtype, sent)
    if function not in functions:
        functions.append(function)
    return Transform(function, name_of(function), functions.index(function), dtype, sent)


def name_of(function: Any) -> str:
    """The qualified name of a function, of what a partial calls, or of the class of an object that can be called."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    own = function if hasattr(function, "__qualname__") else type(function)
    return f"{own.__module__}.{own.__qualname__}"
