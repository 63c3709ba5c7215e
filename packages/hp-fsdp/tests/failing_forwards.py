"""A model whose forward fails where a test wants it, sharded and in one process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import DTensor
from hp_fsdp import fully_shard
from hp_fsdp.states import ShardState
from hp_fsdp.unit import Unit
from hp_platform.testing import World

sys.path.insert(0, str(Path(__file__).parent))
from attack_pairs import Pair
from fsdp_models import Maker, sgd_step


class OnPurposeError(Exception):
    """Raised where a test wants a failure."""


class Fuse:
    """Blows where it is told to."""

    def __init__(self) -> None:
        self.place = ""
        self.error: type[BaseException] = OnPurposeError

    def __call__(self, place: str) -> None:
        if place == self.place:
            raise self.error(f"at {place}")

    @contextmanager
    def blows(self, place: str, error: type[BaseException] = OnPurposeError) -> Iterator[None]:
        """The block ends with the error, which is caught, and the fuse is whole again."""
        self.place, self.error = place, error
        with pytest.raises(error, match=f"^at {place}"):
            yield
        self.place = ""


def build(fuse: Callable[[str], None]) -> Callable[[Maker], Any]:
    """Three units, the second with one inside of it that runs twice, between two layers of the root."""

    def make(maker: Maker) -> Any:
        platform = maker.platform

        class Block(platform.Module):
            def __init__(self, place: str, width: int) -> None:
                super().__init__()
                self.place, self.layer = place, maker.block(4, width)

            def forward(self, x: Any) -> Any:
                x = platform.silu(self.layer(x))
                fuse(self.place)
                return self.layer(x)

        class Outer(platform.Module):
            def __init__(self) -> None:
                super().__init__()
                self.before, self.inner, self.after = (
                    maker.linear(4, 4),
                    maker.block(4, 3),
                    maker.linear(4, 4),
                )
                self.inside = Block("inner unit", 5)

            def forward(self, x: Any) -> Any:
                x = self.before(x)
                fuse("outer unit, before the inner one")
                x = self.inside(x)
                self.inside.place = "inner unit, second call"
                try:
                    x = self.inside(x)
                finally:
                    self.inside.place = "inner unit"
                x = self.after(self.inner(x))
                fuse("outer unit, after the inner one")
                return x

        def setup(module: Any) -> None:
            module.first, module.last = maker.linear(4, 4), maker.linear(3, 4)
            module.units = platform.ModuleList([Block("first unit", 6), Outer(), Block("last unit", 7)])

        def forward(module: Any, x: Any, rank: int) -> Any:
            x = module.first(x)
            fuse("root, before units")
            for unit in module.units:
                x = unit(x)
            x = module.last(x)
            fuse("root, after units")
            return x

        return maker.model(setup, forward)

    return make


class Training(Pair):
    """Of the model above."""

    def __init__(self, world: World, **options: Any) -> None:
        self.fuse = Fuse()

        def shard(model: Any, mesh: Any) -> None:
            for module in (model.units[0], model.units[1].inside, model.units[1], model.units[2], model):
                fully_shard(module, mesh, **options)

        super().__init__(world, build(self.fuse), shard)
        self.batch = 0
        self.own = dict(self.platform.named_parameters(self.sharded))

    def train(self) -> None:
        """A step of both; all gradients are those of one process."""
        self.backward(self.loss(self.batch))
        self.finish(self.reference_loss(self.batch))

    def finish(self, reference_loss: Any) -> None:
        self.backward(reference_loss)
        self.check()
        sgd_step(self.platform, self.reference)
        sgd_step(self.platform, self.sharded)
        self.batch = self.batch + 1

    def check_shards(self) -> None:
        """The parameters are the very ones that an optimizer knows, and nothing is held for whole ones."""
        found = dict(self.platform.named_parameters(self.sharded))
        assert list(found) == list(self.own)
        assert all(isinstance(found[name], DTensor) and found[name] is self.own[name] for name in found)
        assert list(self.platform.state_dict(self.sharded)) == list(self.own)
        for unit in self.units:
            assert is_freed(unit), unit.label


def is_freed(unit: Unit) -> bool:
    platform = unit.platform
    return unit.state is ShardState.SHARDED and not any(
        platform.storage_nbytes(param.full)
        for param in unit.params
        if param.full is not None and not param.is_alias
    )
