"""How an optimizer finds out that shards of several parameters lie in one flat tensor, which it may update as one.

A parameter whose shard is a part of such a tensor has the attribute :data:`FLAT_SHARDS`; who shards it keeps that true. A
package that shards (hp-fsdp) implements it, one that updates (hp-optim) asks; neither knows the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

from hp_platform.protocols.tensor import Tensor

FLAT_SHARDS: Final = "_hp_flat_shards"
"""Attribute of a parameter: a :class:`FlatShards`. A copied or pickled parameter has one that knows of no row."""


@dataclass(frozen=True)
class FlatRow:
    """One flat tensor."""

    row: Tensor
    """1-D. Between and behind the shards may be padding, which belongs to nobody: anything may be written there."""
    parameters: tuple[Any, ...]
    """DTensors in the order of their local tensors in the row. One without elements here may be among them."""
    offsets: tuple[int, ...]
    """Where each begins, in elements."""


class FlatShards(Protocol):
    """Of a parameter, or of several that are sharded together."""

    def row_of(self, parameter: Any) -> FlatRow | None:
        """The row that this parameter's local tensor lies in; None if it lies in none, now.

        The same object for as long as nothing has changed; who keeps it checks that the local tensors still are where it says, since a
        user may put other memory below a parameter at any time. Writes to the row count as writes to the parameters.
        No communication.
        """
        ...
