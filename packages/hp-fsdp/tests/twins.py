"""The same model unsharded and sharded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hp_platform.testing import World, assert_parity

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import (
    PROGRAMS,
    Maker,
    loss_of,
    make_mesh,
    numpy_of,
    sgd_step,
    tolerance,
    whole,
)


class Twins:
    """The same model unsharded and sharded, with the same losses of all ranks at hand."""

    def __init__(self, world: World, name: str = "mlp", **kwargs: Any) -> None:
        self.world, self.platform, self.program = world, world.platform, PROGRAMS[name]
        self.reference = self.program.build(Maker(world))
        self.shapes = {n: tuple(p.shape) for n, p in self.platform.named_parameters(self.reference)}
        self.mesh = make_mesh(world)
        self.sharded = self.program.shard(self.program.build(Maker(world)), self.mesh, **kwargs)

    def loss(self, batch: int) -> Any:
        """The sharded model's, of this rank's samples."""
        inputs = self.program.inputs(Maker(self.world), self.world.rank, batch)
        return loss_of(self.platform, self.sharded(inputs, rank=self.world.rank))

    def reference_loss(self, batch: int) -> Any:
        """The unsharded model's, the mean over all ranks."""
        losses = [
            loss_of(
                self.platform, self.reference(self.program.inputs(Maker(self.world), rank, batch), rank=rank)
            )
            for rank in range(self.world.size)
        ]
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total / self.world.size

    def backward(self, *losses: Any) -> None:
        self.platform.backward(list(losses))

    def step(self) -> None:
        sgd_step(self.platform, self.reference)
        sgd_step(self.platform, self.sharded)

    def check(self, what: str = "grad") -> None:
        platform = self.platform
        value = platform.get_grad if what == "grad" else platform.detach
        assert_parity(
            whole(self.world, self.sharded, self.shapes, self.mesh, value),
            numpy_of(platform, self.reference, value),
            **tolerance(self.world),
            name=what,
        )
