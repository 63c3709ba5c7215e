"""A module unsharded and sharded, and their gradients side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from fsdp_models import Maker, loss_of, make_mesh, numpy_of, tolerance, whole

from hp_fsdp.unit import Unit, units_in
from hp_platform.testing import World, assert_parity


class Pair:
    """``build(maker)`` twice; ``shard(model, mesh)`` makes units of the second one."""

    def __init__(
        self, world: World, build: Callable[[Maker], Any], shard: Callable[[Any, Any], Any], replicas: int = 1
    ) -> None:
        self.world, self.platform = world, world.platform
        self.reference, self.sharded = build(Maker(world)), build(Maker(world))
        self.shapes = {n: tuple(p.shape) for n, p in self.platform.named_parameters(self.reference)}
        self.mesh = make_mesh(world, replicas)
        shard(self.sharded, self.mesh)

    @property
    def units(self) -> list[Unit]:
        return list(units_in(self.platform, self.sharded))

    def inputs(self, rank: int, batch: int = 0) -> Any:
        maker = Maker(self.world)
        values = np.random.default_rng(100 * batch + rank).uniform(-1, 1, (3, 4))
        return self.platform.tensor(values, maker.dtype, maker.device)

    def loss(self, batch: int = 0) -> Any:
        """The sharded model's, of this rank's samples."""
        rank = self.world.rank
        return loss_of(self.platform, self.sharded(self.inputs(rank, batch), rank=rank))

    def reference_loss(self, batch: int = 0) -> Any:
        """The unsharded model's, the mean over all ranks."""
        losses = [
            loss_of(self.platform, self.reference(self.inputs(rank, batch), rank=rank))
            for rank in range(self.world.size)
        ]
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total / self.world.size

    def backward(self, loss: Any) -> None:
        self.platform.backward([loss])

    def check(self) -> None:
        """All gradients, and None where there is none."""
        get_grad = self.platform.get_grad
        assert_parity(
            whole(self.world, self.sharded, self.shapes, self.mesh, get_grad),
            numpy_of(self.platform, self.reference, get_grad),
            **tolerance(self.world),
        )
