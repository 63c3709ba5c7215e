"""Orders of norms: how the norms of parts make the norm of the whole.

``|x|_p = (sum over parts of |part|_p ** p) ** (1/p)``. Two limits and one extension follow the same pattern: the largest and the
smallest magnitude for ``inf`` and ``-inf``, and the number of elements that are not 0 for 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor


@dataclass(frozen=True)
class Order:
    """One order ``p``. Values of parts (:meth:`values`) are combined on a rank and over ranks by one reduction, :attr:`op`."""

    p: float

    @property
    def op(self) -> str:
        """How values combine: ``"sum"``, ``"max"`` or ``"min"``."""
        return {math.inf: "max", -math.inf: "min"}.get(self.p, "sum")

    @property
    def neutral(self) -> float:
        """The value of a part without elements."""
        return math.inf if self.op == "min" else 0.0

    def values(self, platform: Platform, norms: Tensor) -> Tensor:
        """What combines, of the norms ``(n,)`` of parts."""
        if self.p == 2:
            return norms * norms
        return norms if self._is_plain else norms ** _number(platform, self.p, norms)

    def combined(self, platform: Platform, values: Tensor) -> Tensor:
        """``(n,)`` values, at least one, to one of shape ``(1,)``."""
        if self.op == "sum":
            return platform.sum(values, 0, keepdim=True)
        if self.op == "max":
            return platform.amax(values, 0, keepdim=True)
        return -platform.amax(-values, 0, keepdim=True)

    def norm(self, platform: Platform, value: Tensor) -> Tensor:
        """The norm whose value this is."""
        if self.p == 2:
            return platform.sqrt(value)
        return value if self._is_plain else value ** _number(platform, 1 / self.p, value)

    @property
    def _is_plain(self) -> bool:
        """Whether norms combine as they are."""
        return self.p in (0, 1) or math.isinf(self.p)


def order_of(norm_type: Any) -> Order:
    """The order that a caller means. ValueError for what is no number, and for NaN."""
    given = norm_type
    if isinstance(given, str):
        try:
            given = float(given)
        except ValueError:
            given = None
    if isinstance(given, bool) or not isinstance(given, Real) or math.isnan(given):
        raise ValueError(
            f"norm_type is {norm_type!r}; it is the p of a p-norm: 2.0, 1.0, any other number, 0, or 'inf' and '-inf' for the largest and "
            "the smallest magnitude"
        )
    return Order(float(given))


def _number(platform: Platform, value: float, like: Tensor) -> Tensor:
    """As a tensor: MindSpore would round a number to float32."""
    return platform.full((), value, like.dtype, platform.device_of(like))
