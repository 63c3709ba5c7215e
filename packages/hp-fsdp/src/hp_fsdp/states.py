"""In which state a unit's parameters are, and which of its calls backward has to wait for."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ShardState(enum.Enum):
    """Where the unit's parameters are. [Note: shown only while needed] Modules show whole parameters while forward or the
    unit's backward runs, and shards at all other times: what looks at a model between forward and backward meets shards.
    """

    SHARDED = "sharded"
    """No memory is held for whole parameters; the modules show the shards."""
    GATHERING = "gathering"
    """Memory is held, and is being filled; the modules show the shards."""
    GATHERED = "gathered"
    """Whole parameters are there, for backward or for the next forward; the modules show the shards."""
    SHOWN = "shown"
    """Whole parameters are there, and the modules show them."""


@dataclass(eq=False)
class Uses:
    """The calls of a unit within one pass (one call of the outermost module), as far as backward must wait for them."""

    pass_number: int
    num_calls: int = 0
    num_done: int = 0
    """How many of them a backward has left through their inputs."""
    versions: tuple[int, ...] | None = None
    """Of the shards, when the first of them was gathered for."""
    takes_gradients: bool = False
    """Whether an argument of one of them asks for a gradient."""
