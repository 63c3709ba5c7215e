"""What a row of the tables of wrong calls is: what is done, and what is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdp_models import make_mesh

from hp_fsdp import fully_shard
from hp_platform.testing import World

Model = Any
Change = Callable[[World, Model], Any]


@dataclass(frozen=True)
class Call:
    """A wrong call on a model of two blocks and a head."""

    run: Change
    message: str
    error: type[Exception] = ValueError
    before: Change | None = None
    """What is done to the model before; not wrong by itself."""


def refused(message: str, **kwargs: Any) -> Call:
    """An argument of ``fully_shard``."""
    return Call(lambda world, model: fully_shard(model, make_mesh(world), **kwargs), message)


def with_sharded(run: Callable[[Any], Any], message: str, error: type[Exception] = ValueError) -> Call:
    """Something that a sharded model is asked for."""
    return Call(lambda world, model: run(model), message, error, shard)


def shard(world: World, model: Model) -> Model:
    return fully_shard(model, make_mesh(world))
