"""What a pass of a case sends over the data-parallel ranks, by hand: number and bytes of every kind of collective.

A unit that is cut among ``n`` ranks, whose longest pieces have ``row`` elements together, gathers ``n * row`` elements before
forward, and again before backward if it was freed in between (the root is not). It reduces ``n * (row + tail)`` elements, where the
tail has one number for each parameter that trains, and all-reduces the parameters that are not cut; then replicas reduce
``row + tail`` and those.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from matrix_modes import Sharded, chunk_of

from hp_platform.testing import Counted

ALIGNMENT = 64
"""Elements: a whole parameter begins at a multiple of it where several lie in one storage."""


@dataclass
class Traffic:
    """Kind -> number of collectives, and their bytes together."""

    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    nbytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def __str__(self) -> str:
        return ", ".join(
            f"{n} {kind} of {self.nbytes[kind]} bytes" for kind, n in sorted(self.counts.items())
        )

    def add(self, kind: str, number: int, nbytes: int) -> None:
        if number:
            self.counts[kind] = self.counts[kind] + number
            self.nbytes[kind] = self.nbytes[kind] + nbytes


class UnitByHand:
    """Sizes of a unit's parameters on this rank."""

    def __init__(self, sharded: Sharded, unit: str) -> None:
        grid = sharded.grid
        self.name = unit
        self.is_root = unit == ""
        self.needs_backward = unit not in sharded.program.without_backward
        self.slots: dict[str, int] = {}
        """Elements of the longest piece of every parameter that is cut."""
        self.whole_sizes: dict[str, int] = {}
        """Elements that they take while they are whole."""
        self.uncut: dict[str, int] = {}
        """Elements of the other ones; none of them is a scalar."""
        for name, shape in sharded.shapes.items():
            if sharded.program.unit_of(name) != unit:
                continue
            dim, tp_dim = sharded.cut_dims[name], sharded.tp_dims[name]
            if tp_dim is not None:
                start, end = chunk_of(shape[tp_dim], grid.num_tp, grid.tp_rank)
                shape = (*shape[:tp_dim], end - start, *shape[tp_dim + 1 :])
            if dim is None:
                self.uncut[name] = math.prod(shape)
                continue
            longest = chunk_of(shape[dim], grid.num_shards, 0)[1]
            rest = math.prod(shape) // shape[dim] if shape[dim] else 0
            self.slots[name] = longest * rest
            # Pieces of dim 0 stand one after the other, padding included; others are put together in the shape itself.
            self.whole_sizes[name] = longest * rest * grid.num_shards if dim == 0 else math.prod(shape)
        self.trained = [n for n in (*self.slots, *self.uncut) if sharded.trains[n]]
        self.reduced = [self.slots[n] for n in self.slots if sharded.trains[n]]
        self.tail = len(self.trained)


def expected_traffic(sharded: Sharded) -> Traffic:
    """Of the forwards and backwards of a step."""
    found = Traffic()
    for part in range(sharded.num_parts):
        _add_pass(found, sharded, part, is_last=part == sharded.num_parts - 1)
    return found


def _add_pass(found: Traffic, sharded: Sharded, part: int, *, is_last: bool) -> None:
    case, grid, platform = sharded.case, sharded.grid, sharded.platform
    assert not sharded.is_compat, "operations on DTensors send what they send without fully_shard"
    wide = platform.itemsize(platform.dtype(sharded.maker.widest))
    compute = wide if case.precision == "wide" else 2
    # Whole parameters that the micro-batch before has left serve again, where the framework can tell that nobody has written.
    finds_whole = case.keep and part > 0 and platform.supports("version_counter", sharded.world.device)
    for name in ("", *sharded.program.units):
        unit = UnitByHand(sharded, name)
        if grid.num_shards > 1 and any(unit.slots.values()):
            # What is empty, on tensor-parallel ranks that have nothing of it, does not travel.
            gathers = sum(numel > 0 for numel in unit.slots.values()) if case.fusion is False else 1
            nbytes = grid.num_shards * sum(unit.slots.values()) * compute
            freed = not unit.is_root and sharded.reshard is not False
            if not (finds_whole and unit.needs_backward):
                found.add("all_gather", gathers, nbytes)
            if freed and unit.needs_backward:
                if _is_small_world(sharded):
                    found.add("all_gather", *_small_world(sharded, unit, compute))
                else:
                    found.add("all_gather", gathers, nbytes)
        if not unit.trained or (case.accumulate == "whole" and not is_last):
            continue
        line = sum(unit.reduced) + unit.tail
        beside = sum(numel for n, numel in unit.uncut.items() if sharded.trains[n])
        if grid.num_shards > 1:
            reductions = sum(numel > 0 for numel in unit.reduced) + 1 if case.fusion is False else 1
            sends_narrow = (
                compute < wide
                and platform.supports("exchange", sharded.world.device)
                and case.accumulate != "whole"
            )
            kind, size = ("all_to_all", compute) if sends_narrow else ("reduce_scatter", wide)
            found.add(kind, reductions, grid.num_shards * line * size)
            found.add("all_reduce", int(beside > 0), beside * wide)
        if grid.num_replicas > 1 and (case.accumulate != "shards" or is_last):
            found.add("all_reduce", 1, (line + beside) * wide)


def _is_small_world(sharded: Sharded) -> bool:
    return not isinstance(sharded.reshard, bool) and sharded.reshard < sharded.grid.num_shards


def _small_world(sharded: Sharded, unit: UnitByHand, itemsize: int) -> tuple[int, int]:
    """Two neighbours gather the memory of all whole parameters, cut in halves as it lies."""
    platform, world = sharded.platform, sharded.world
    num_ranks = int(sharded.reshard)
    sizes = list(unit.whole_sizes.values())
    if platform.supports("storage_views", world.device) and platform.supports(
        "write_into_view", world.device
    ):
        sizes = [sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]  # one storage
    return len(sizes), sum(-(-size // num_ranks) * num_ranks for size in sizes) * itemsize


def sent_traffic(counted: Counted, sharded: Sharded) -> Traffic:
    """Among the data-parallel ranks: what tensor-parallel ranks send is none of fully_shard's business."""
    tp = sharded.grid.mesh.get_group("tp") if sharded.grid.has_tp else None
    sent = Traffic()
    for launch in counted.record.launches:
        if launch.group is not tp:
            sent.add(launch.kind, 1, launch.nbytes)
    return sent
