"""A world without processes: what meshes ask of it, recorded. No framework is imported here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from hp_platform import _process
from hp_platform.group import ProcessGroup, WorldTables


@dataclass(frozen=True)
class Handle:
    """A framework's group."""

    ranks: tuple[int, ...]


class GroupMaker:
    """The part of a platform that makes groups."""

    def __init__(self) -> None:
        self.made: list[tuple[int, ...]] = []

    def new_group(self, ranks: Sequence[int], timeout: timedelta) -> Handle:
        self.made.append(tuple(ranks))
        return Handle(tuple(ranks))

    def native_timeout(self, group: Handle) -> None:
        """It tells none."""

    def native_ranks(self, group: Handle) -> tuple[int, ...]:
        return group.ranks

    def handle(self, ranks: tuple[int, ...]) -> Handle:
        """A group that the user makes through the framework."""
        return Handle(ranks)


@pytest.fixture(autouse=True)
def no_launcher_and_no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test says itself which rank it is."""
    for name in ("RANK", "WORLD_SIZE", "MS_WORKER_NUM", "RANK_ID", "MS_NODE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_process.state, "world", None)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> GroupMaker:
    """The groups that were made through the platform."""
    maker: Any = GroupMaker()
    monkeypatch.setattr(_process.state, "platform", maker)
    return maker


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch, groups: GroupMaker) -> Callable[[int, int], ProcessGroup]:
    """``join(rank, world_size)`` makes this process that rank of a new world."""

    def as_rank(rank: int, world_size: int) -> ProcessGroup:
        ranks = tuple(range(world_size))
        world = ProcessGroup(
            ranks, rank, "gloo", timedelta(seconds=1), Handle(ranks), tables=WorldTables("cpu")
        )
        assert world.tables is not None
        world.tables.groups[ranks] = world
        monkeypatch.setattr(_process.state, "world", world)
        return world

    return as_rank
