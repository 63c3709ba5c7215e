"""The collectives behind the conversions, on local tensors outside of the graph: started, and finished when they have arrived.

Each function runs one collective. With ``async_op=True`` it gives a :class:`Pending`, whose ``wait()`` has the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hp_platform import ProcessGroup, collectives, get_platform

Tensor = Any
_collectives: Any = collectives  # whether they run asynchronously is a value here


@dataclass(frozen=True, eq=False)
class Cut:
    """How tensor dim ``dim`` is dealt to the ranks along a mesh dim."""

    group: ProcessGroup
    positions: tuple[int, ...]
    """For each coordinate along the mesh dim its position in the group, whose ranks ascend whatever the mesh says."""
    index: int
    """This rank's coordinate."""
    dim: int
    sizes: tuple[int, ...]
    """Of the chunks, by coordinate."""

    @cached_property
    def is_even(self) -> bool:
        """Whether blocks of equal size lie in the group's order: what the plain collectives take."""
        return len(set(self.sizes)) == 1 and self.positions == tuple(range(len(self.positions)))

    @cached_property
    def by_position(self) -> tuple[int, ...]:
        """For each position in the group its coordinate."""
        return tuple(sorted(range(len(self.positions)), key=self.positions.__getitem__))


class Pending:
    """A collective that is under way."""

    __slots__ = ("_finish", "_work")

    def __init__(self, work: Any, finish: Callable[[Any], Tensor]) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> Tensor:
        """The result, ready for what the current stream does next."""
        return self._finish(self._work.wait())


def _run(start: Callable[[bool], Any], finish: Callable[[Any], Tensor], async_op: bool) -> Any:
    return Pending(start(True), finish) if async_op else finish(start(False))


def all_reduce(x: Tensor, group: ProcessGroup, op: str = "sum", *, async_op: bool = False) -> Any:
    """The reduction of the ranks' ``x``."""
    x = get_platform().detach(x)
    return _run(lambda a: _collectives.all_reduce(x, group, op, async_op=a), lambda found: found, async_op)


def gather(x: Tensor, cut: Cut, *, async_op: bool = False) -> Any:
    """The chunks of all ranks together."""
    platform = get_platform()
    x = platform.detach(x)
    if cut.is_even:

        def joined(stacked: Tensor) -> Tensor:
            if cut.dim == 0:
                return stacked
            if math.prod(x.shape[: cut.dim]) == 1:  # a batch of one: the chunks lie in order
                whole = (*x.shape[: cut.dim], sum(cut.sizes), *x.shape[cut.dim + 1 :])
                return platform.reshape(stacked, whole)
            return platform.cat(platform.split(stacked, [x.shape[0]] * len(cut.sizes)), cut.dim)

        return _run(lambda a: _collectives.all_gather(x, cut.group, async_op=a), joined, async_op)
    rows = x if cut.dim == 0 else platform.transpose(x, 0, cut.dim)
    sizes = [cut.sizes[c] for c in cut.by_position]

    def joined_rows(pieces: list[Tensor]) -> Tensor:
        whole = platform.cat([pieces[position] for position in cut.positions])
        return whole if cut.dim == 0 else platform.contiguous(platform.transpose(whole, 0, cut.dim))

    return _run(
        lambda a: _collectives.all_gather_uneven(rows, sizes, cut.group, async_op=a), joined_rows, async_op
    )


def reduce_scatter(x: Tensor, cut: Cut, op: str = "sum", *, async_op: bool = False) -> Any:
    """The own chunk of the reduction."""
    platform = get_platform()
    x = platform.detach(x)
    if cut.is_even:
        if cut.dim != 0:
            blocks = _blocks_first(platform, x, cut)
            x = platform.reshape(blocks, (blocks.shape[0] * blocks.shape[1], *blocks.shape[2:]))
        return _run(
            lambda a: _collectives.reduce_scatter(x, cut.group, op, async_op=a), lambda found: found, async_op
        )
    rows = x if cut.dim == 0 else platform.transpose(x, 0, cut.dim)
    pieces = platform.split(rows, list(cut.sizes))
    ordered = [pieces[c] for c in cut.by_position]

    def turned(mine: Tensor) -> Tensor:
        return mine if cut.dim == 0 else platform.contiguous(platform.transpose(mine, 0, cut.dim))

    return _run(
        lambda a: _collectives.reduce_scatter_uneven(ordered, cut.group, op, async_op=a), turned, async_op
    )


def all_to_all(x: Tensor, source: Cut, target: Cut, *, async_op: bool = False) -> Any:
    """From chunks of one dim to chunks of another.

    [Note: copies] A chunk travels with the dim that is cut in front, so one copy turns the whole tensor, none if that is dim 0
    anyway; one more copy lays what has arrived along the dim that is joined, none if that is dim 0.
    """
    platform = get_platform()
    x = platform.detach(x)
    if source.is_even and target.is_even:
        return _even_all_to_all(platform, x, source, target, async_op)
    return _uneven_all_to_all(platform, x, source, target, async_op)


def _even_all_to_all(platform: Any, x: Tensor, source: Cut, target: Cut, async_op: bool) -> Any:
    num_ranks = len(source.sizes)
    blocks = _blocks_first(platform, x, target)
    shape = list(x.shape)
    shape[source.dim], shape[target.dim] = x.shape[source.dim] * num_ranks, target.sizes[0]

    def joined(arrived: Tensor) -> Tensor:
        return platform.reshape(_moved(platform, arrived, 0, source.dim), tuple(shape))

    return _run(lambda a: _collectives.all_to_all(blocks, source.group, async_op=a), joined, async_op)


def _uneven_all_to_all(platform: Any, x: Tensor, source: Cut, target: Cut, async_op: bool) -> Any:
    """Blocks travel flat and in the group's order, because their shapes differ from rank to rank."""
    turned = _moved(platform, x, target.dim, 0)
    sizes = [target.sizes[c] for c in target.by_position]
    if target.by_position == tuple(range(len(sizes))):
        turned = platform.contiguous(turned)
    else:
        pieces = platform.split(turned, list(target.sizes))
        turned = platform.cat([pieces[c] for c in target.by_position])
    row = math.prod(turned.shape[1:])
    shapes = []
    for coordinate in source.by_position:
        shape = list(x.shape)
        shape[source.dim] = source.sizes[coordinate]
        del shape[target.dim]
        shapes.append((target.sizes[target.index], *shape))
    out_sizes = [math.prod(shape) for shape in shapes]

    def joined(arrived: Tensor) -> Tensor:
        blocks = [
            _moved(platform, platform.reshape(block, shape), 0, target.dim)
            for block, shape in zip(platform.split(arrived, out_sizes), shapes, strict=True)
        ]
        return platform.cat([blocks[position] for position in source.positions], source.dim)

    flat, in_sizes = platform.reshape(turned, (-1,)), [size * row for size in sizes]
    return _run(
        lambda a: _collectives.all_to_all(
            flat, source.group, in_sizes=in_sizes, out_sizes=out_sizes, async_op=a
        ),
        joined,
        async_op,
    )


def _blocks_first(platform: Any, x: Tensor, cut: Cut) -> Tensor:
    """The equal chunks of ``x`` one after the other along a new first dim; contiguous."""
    split = (*x.shape[: cut.dim], len(cut.sizes), cut.sizes[0], *x.shape[cut.dim + 1 :])
    return platform.contiguous(_moved(platform, platform.reshape(x, split), cut.dim, 0))


def _moved(platform: Any, x: Tensor, start: int, end: int) -> Tensor:
    """A view in which dim ``start`` stands at ``end`` and the others keep their order."""
    step = 1 if end > start else -1
    for dim in range(start, end, step):
        x = platform.transpose(x, dim, dim + step)
    return x
