"""What becomes of what a layer saves for backward: it stays, it is swapped, or it is computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerCost:
    """Of one layer in one step."""

    name: str
    nbytes: int
    """That swap could free: what it saves for backward and nobody else holds."""
    forward_ms: float
    """Of its forward."""
    inputs_nbytes: int = 0
    """Of those: its arguments, which stay wanted when the layer is computed again."""
    pieces: tuple[int, ...] = ()
    """The bytes of its memories, which move as a whole; empty: any part may move."""

    @property
    def backward_ms(self) -> float:
        """Two products for each of forward: for the gradients of what is multiplied, and of what it is multiplied with."""
        return 2 * self.forward_ms

    def fitting(self, room: int) -> int:
        """How many of its bytes stay if there is room for so many."""
        return (
            sum(self.pieces[place] for place in fitting(self.pieces, room))
            if self.pieces
            else min(max(room, 0), self.nbytes)
        )


@dataclass(frozen=True)
class LayerChoice:
    """What becomes of what a layer saves."""

    cost: LayerCost
    choice: str
    """``"keep"``, ``"swap"`` (what does not stay) or ``"recompute"``."""
    stays_nbytes: int
    """Of its bytes."""

    @property
    def moving_nbytes(self) -> int:
        """That go to the host and come back: of a layer that is computed again its arguments."""
        if self.choice == "recompute":
            return self.cost.inputs_nbytes
        return self.cost.nbytes - self.stays_nbytes

    @property
    def again_nbytes(self) -> int:
        """That are made when it is computed again."""
        return max(self.cost.nbytes - self.cost.inputs_nbytes, 0) if self.choice == "recompute" else 0


def fitting(sizes: Sequence[int], room: int) -> list[int]:
    """Places of those that fit together, largest first, so that little room is left."""
    found = []
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        if sizes[place] <= room:
            found.append(place)
            room = room - sizes[place]
    return found
