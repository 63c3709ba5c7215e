"""A chain of units that run in any order, sharded and in one process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_fsdp import fully_shard
from hp_fsdp.unit import units_in
from hp_platform import DeviceMesh
from hp_platform.testing import World, assert_parity

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import Maker, local, loss_of, make_mesh, tolerance

NUM_UNITS = 4
RATE = 0.05


def chain(maker: Maker) -> Any:
    """Blocks that are called in the order that ``rank`` says, some perhaps not, some perhaps twice; then a head."""

    def setup(module: Any) -> None:
        module.blocks = maker.platform.ModuleList([maker.block(4, 3 + at) for at in range(NUM_UNITS)])
        module.head = maker.linear(3, 4)

    def forward(module: Any, x: Any, rank: Any) -> Any:
        for at in rank:
            x = module.blocks[at](x)
        return module.head(x)

    return maker.model(setup, forward)


class Pair:
    """A model sharded, and the same in one process."""

    def __init__(self, world: World, seed: int = 0, mesh: DeviceMesh | None = None, **kwargs: Any) -> None:
        self.world, self.platform = world, world.platform
        self.reference, self.model = (chain(self._maker(seed)) for _ in range(2))
        mesh = mesh or make_mesh(world)
        for block in self.model.blocks:
            fully_shard(block, mesh, **kwargs)
        fully_shard(self.model, mesh, **kwargs)
        self.units = list(units_in(self.platform, self.model))

    def _maker(self, seed: int) -> Maker:
        maker = Maker(self.world)
        maker.random = np.random.default_rng(seed)
        return maker

    def inputs(self, batch: int, rank: int) -> Any:
        maker = Maker(self.world)
        random = np.random.default_rng(1000 * batch + rank)
        return self.platform.tensor(random.uniform(-1, 1, (2, 4)), maker.dtype, maker.device)

    def loss(self, batch: int, order: Sequence[int] = range(NUM_UNITS)) -> Any:
        """The sharded model's, of this rank's samples."""
        return loss_of(self.platform, self.model(self.inputs(batch, self.world.rank), rank=tuple(order)))

    def reference_loss(self, batch: int, order: Sequence[int] = range(NUM_UNITS)) -> Any:
        """The mean over the samples of all ranks."""
        total = None
        for rank in range(self.world.size):
            loss = loss_of(self.platform, self.reference(self.inputs(batch, rank), rank=tuple(order)))
            total = loss if total is None else total + loss
        return total / self.world.size

    def backward(self, batch: int, order: Sequence[int] = range(NUM_UNITS)) -> None:
        """Of both."""
        for loss in (self.loss(batch, order), self.reference_loss(batch, order)):
            self.platform.backward([loss])

    def step(self, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Stochastic gradient descent of both, on the parameters of these names; their gradients are dropped."""
        platform = self.platform
        for model in (self.reference, self.model):
            for name, parameter in platform.named_parameters(model):
                gradient = platform.get_grad(local(parameter)) if wanted(name) else None
                if gradient is not None:
                    platform.add_(local(parameter), gradient, alpha=-RATE)
                    platform.set_grad(local(parameter), None)

    def drop_gradients(self) -> None:
        self.model.zero_grad()
        for _, parameter in self.platform.named_parameters(self.reference):
            self.platform.set_grad(parameter, None)

    def check(self) -> None:
        """Parameters and gradients are those of one process."""
        platform = self.platform
        pairs = zip(
            platform.named_parameters(self.model), platform.named_parameters(self.reference), strict=True
        )
        for (name, shard), (_, whole) in pairs:
            limits = {**tolerance(self.world), "name": name}
            assert_parity(platform.detach(shard), platform.detach(whole), **limits)
            assert_parity(shard.grad, platform.get_grad(whole), **limits)

    def check_freed(self) -> None:
        """No whole parameter is in memory, and the model shows shards."""
        for unit in self.units:
            for param in unit.params:
                if not param.is_alias:
                    assert self.platform.storage_nbytes(param.full) == 0, f"{unit.label} {param.name}"
                for owner in param.owners:
                    assert getattr(owner.module, owner.attribute) is param.parameter


# ------------------------------------------------------------------------------------------------------------- failures
class OnPurposeError(RuntimeError):
    """Raised where a test wants a failure."""


def fail(*_: Any) -> Any:
    raise OnPurposeError("a failure")


def loss_of_rank(pair: Pair, batch: int) -> Any:
    """The reference's, on this rank's samples."""
    output = pair.reference(pair.inputs(batch, pair.world.rank), rank=tuple(range(NUM_UNITS)))
    return loss_of(pair.platform, output)


def fail_in_forward(pair: Pair, at: int, batch: int) -> None:
    """When the unit is called."""
    handle = pair.platform.register_forward_pre_hook(pair.model.blocks[at], fail)
    with pytest.raises(OnPurposeError):
        pair.loss(batch)
    handle.remove()


def fail_in_backward(pair: Pair, at: int, batch: int) -> None:
    """When the gradient of the unit's output is known."""

    def spoil(_: Any, __: tuple, ___: dict, output: Any) -> None:
        pair.platform.register_tensor_hook(output, fail)

    handle = pair.platform.register_forward_hook(pair.model.blocks[at], spoil)
    with pytest.raises(OnPurposeError):
        pair.platform.backward([pair.loss(batch)])
    handle.remove()
