"""Parameters that are DTensors and stay as they are (``mesh=None``): the sums of their gradients over ranks, fused and late.

[Note: compat] Nothing of such a parameter is cut or gathered. What a unit takes over is what operations on DTensors do in
backward: where the ranks along a mesh dim use a Replicate differently (each with its own samples, say), each has a summand of
the gradient, and dispatch reduces it, one parameter after the other, in the middle of the computation. In a unit such a use
gets a leaf of its own over the same memory, one for each set of mesh dims, where summands gather without communication. When
the unit's backward has been left, those of all of its parameters are reduced together, beside the backward of the next unit.
What arrives at the parameter itself is whole already. The sum of both is what dispatch would have given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hp_platform.group import ProcessGroup
from hp_platform.mesh import DeviceMesh
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor

Dims = tuple[int, ...]


class Summands:
    """What this rank adds to the gradient of one parameter, by the mesh dims along which the ranks' summands are to be added."""

    def __init__(
        self,
        platform: Platform,
        mesh: DeviceMesh,
        full: Tensor,
        came: Callable[[Tensor], None],
        kept: Mapping[Dims, Tensor],
    ) -> None:
        """``full``: the local tensor that operations see; ``came`` is called when a backward has added something; ``kept``: from
        backwards without synchronisation.
        """
        self.platform = platform
        self.mesh = mesh
        self.full = full
        self.came = came
        self._leaves: dict[Dims, Tensor] = {}
        self.kept = dict(kept)

    def leaf(self, dims: Dims) -> Tensor:
        """For operations that differ along these mesh dims."""
        found = self._leaves.get(dims)
        if found is None:
            found = self.platform.set_requires_grad_(self.platform.detach(self.full), True)
            self.platform.register_post_accumulate_grad_hook(found, self.came)
            self._leaves[dims] = found
        return found

    def follow(self) -> None:
        """The memory below :attr:`full` is another one."""
        for leaf in self._leaves.values():
            self.platform.set_data_(leaf, self.platform.detach(self.full))

    def take(self) -> list[tuple[Dims, tuple[ProcessGroup, ...], Tensor]]:
        """What has come since the last synchronisation, with the mesh dims to add it up over and their groups; and forget it."""
        self.keep()
        kept, self.kept = self.kept, {}
        return [
            (dims, tuple(self.mesh.get_group(dim) for dim in dims), gradient)
            for dims, gradient in kept.items()
        ]

    def keep(self) -> None:
        """Set aside what the running backward has given, until one that synchronises."""
        platform = self.platform
        for dims, leaf in self._leaves.items():
            found = platform.get_grad(leaf)
            if found is not None:
                platform.set_grad(leaf, None)
                before, found = self.kept.get(dims), platform.detach(found)
                self.kept[dims] = found if before is None else before + found

    def forget_backward(self) -> None:
        """Drop what the running backward has given; what waits from others stays."""
        for leaf in self._leaves.values():
            self.platform.set_grad(leaf, None)
