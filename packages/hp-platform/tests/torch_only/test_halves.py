"""Halves of peer memory that hang on a group: made once, made larger, given back."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from hp_platform import create_group, destroy_process_group
from hp_platform.halves import ALIGNMENT, Halves, shared_halves
from hp_platform.testing import World, count_collectives, distributed


class Memory:
    """What a device gives that reaches others; here each rank has all parts for itself."""

    def __init__(self, numel: int, dtype: torch.dtype, *rest: Any) -> None:
        self.parts = [torch.zeros(numel, dtype=dtype) for _ in range(2)]
        self.copy_each = self.barrier = None

    def join(self) -> None:
        """Nothing to reach."""

    def of(self, rank: int) -> torch.Tensor:
        return self.parts[rank]


def reaching(patch: pytest.MonkeyPatch, world: World, make: Any) -> None:
    kind = type(world.platform)
    supports = kind.supports
    patch.setattr(kind, "supports", lambda p, name, d=None: name == "peer_memory" or supports(p, name, d))
    patch.setattr(kind, "peer_domain", lambda p, device: "here")
    patch.setattr(kind, "peer_memory", lambda p, *arguments: make(*arguments))
    patch.setattr(world.group, "halves", {})  # the world outlives the test


@distributed(2, backends="torch")
def test_halves_of_a_group_are_made_once_and_grow(world: World) -> None:
    group = world.group
    with pytest.MonkeyPatch.context() as patch, count_collectives() as counted:
        reaching(patch, world, Memory)
        first = shared_halves(100, torch.float32, "cpu", group)
        assert isinstance(first, Halves)
        assert first.numel == 2 * ALIGNMENT
        assert shared_halves(128, torch.float32, "cpu", group) is first
        other = shared_halves(5, torch.bfloat16, "cpu", group)
        assert other is not first, "one pair for each dtype"
        given_back = weakref.ref(first)
        del first
        larger = shared_halves(129, torch.float32, "cpu", group)
        assert larger is not None
        assert larger.numel == 3 * ALIGNMENT
        gc.collect()
        assert given_back() is None, "the smaller ones are given back"
        assert shared_halves(1, torch.float32, "cpu", group) is larger
        assert shared_halves(1, torch.bfloat16, "cpu", group) is other
    counted.assert_counts()


@distributed(3, backends="torch")
def test_halves_of_a_group_go_with_it(world: World) -> None:
    if world.rank == 2:
        return
    group = create_group([0, 1])
    with pytest.MonkeyPatch.context() as patch:
        reaching(patch, world, Memory)
        found = shared_halves(1, torch.float32, "cpu", group)
    reference = weakref.ref(found)
    del found
    assert reference() is not None
    destroy_process_group(group)
    gc.collect()
    assert reference() is None


@distributed(2, backends="torch")
def test_without_memory_on_one_rank_nobody_has_halves_and_nobody_asks_again(world: World) -> None:
    calls = []

    def fails_on_one(*arguments: Any) -> Memory:
        calls.append(arguments)
        if world.rank == 1:
            raise RuntimeError("no memory")
        return Memory(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        reaching(patch, world, fails_on_one)
        for numel in (1, 1000):
            assert shared_halves(numel, torch.float32, "cpu", world.group) is None
    assert len(calls) == 1


@distributed(1, backends="torch")
def test_one_rank_has_no_peers(world: World) -> None:
    assert shared_halves(1, torch.float32, "cpu", world.group) is None
