"""Along a cut dim without joining it: running reductions that begin where the ranks before end, and the best of the ranks' best.

[Note: running reductions] Sums, products, maxima and log-sums of all before and itself need of the ranks before one value per
line: their last. So every rank scans its piece, the ranks exchange their last values (one all-gather of one slice per rank;
backward one all-reduce of these), and each scans its piece again behind the result of those before. The kernel that does all
of it is the operation's own, with its own derivative, so zeros in a product and ties of maxima are treated as in the unsharded
operation. Only the order of additions differs: (a + b) + (c + d) instead of ((a + b) + c) + d, within the roundings of as many
additions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor import across
from hp_dtensor.nest import rebuilt
from hp_dtensor.no_elements import meeting, zeros_from
from hp_dtensor.rules.registry import Placements
from hp_dtensor.spec import Spec, local_block
from hp_platform import get_platform

Tensor = Any
Call = Callable[..., Any]


@dataclass(frozen=True)
class Pieces:
    """How the mesh dims that cut tensor dim ``dim`` deal it."""

    spec: Spec
    dim: int
    mesh_dims: tuple[int, ...]
    sizes: tuple[int, ...]
    """In the order of the pieces, as :func:`hp_dtensor.across.of_each` gives values."""
    own: int
    """This rank's place in it."""

    @property
    def offset(self) -> int:
        """Where this rank's piece begins."""
        return sum(self.sizes[: self.own])

    @property
    def size(self) -> int:
        """Of this rank's piece."""
        return self.sizes[self.own]


def pieces_along(x: Spec, lies: Placements, dim: int) -> Pieces | None:
    """The pieces of a tensor that lies so; None where the dim is not cut."""
    mesh_dims = across.cutting(x, (dim,))
    if not mesh_dims or not any(p.is_shard(dim) for p in lies):
        return None
    coordinate = tuple(x.mesh.get_coordinate())
    sizes, own = [], 0
    for i, place in enumerate(itertools.product(*(range(x.mesh.shape[m]) for m in mesh_dims))):
        there = dict(zip(mesh_dims, place, strict=True))
        of_rank = tuple(there.get(m, c) for m, c in enumerate(coordinate))
        sizes.append(local_block(x.shape, lies, x.mesh.shape, of_rank)[0][dim])
        own = i if of_rank == coordinate else own
    return Pieces(x, dim, mesh_dims, tuple(sizes), own)


# ------------------------------------------------------------------------------------------------------ running reductions
def scanned(pieces: Pieces) -> Callable[[Call], Call]:
    """What runs for a running reduction of one result. See [Note: running reductions]."""

    def around(function: Call) -> Call:
        def run(local: Tensor, *args: Any, **named: Any) -> Tensor:
            def scan(part: Tensor) -> Tensor:
                return function(part, *args, **named)

            platform = get_platform()
            y = _none_like(_scan_of_one(scan, local), local) if 0 in local.shape else scan(local)
            before = _before(_last(y, local, pieces.dim), pieces)
            if not before.values or 0 in local.shape:
                return before.met_by(y)
            start = _end(scan(platform.cat(before.values, pieces.dim)), pieces.dim)
            part = local if local.dtype == y.dtype else platform.cast(local, platform.dtype_name(y.dtype))
            whole = scan(platform.cat([start, part], pieces.dim))
            return before.met_by(platform.narrow(whole, pieces.dim, 1, pieces.size))

        return run

    return around


def scanned_with_places(pieces: Pieces) -> Callable[[Call], Call]:
    """The same for cummax and cummin, whose second result is where the value is: one more all-gather, of these."""

    def around(function: Call) -> Call:
        def run(local: Tensor, *args: Any, **named: Any) -> Any:
            def scan(part: Tensor) -> Any:
                return function(part, *args, **named)

            platform, dim = get_platform(), pieces.dim
            nothing = 0 in local.shape
            found = _scan_of_one(scan, local) if nothing else scan(local)
            y, at = (_none_like(x, local) for x in found) if nothing else found
            at = at + pieces.offset
            before = _before(_last(y, local, dim), pieces)
            places = _before(_last(at, local, dim), pieces).values
            if not before.values or nothing:
                return rebuilt(found, [before.met_by(y), at])
            starts, which = scan(platform.cat(before.values, dim))
            which, place = _end(which, dim), places[0]
            for i, other in enumerate(places[1:], 1):
                place = platform.where(which == i, other, place)
            values, at = scan(platform.cat([_end(starts, dim), local], dim))
            at = platform.where(at == 0, place, at + (pieces.offset - 1))
            values, at = (platform.narrow(x, dim, 1, pieces.size) for x in (values, at))
            return rebuilt(found, [before.met_by(values), at])

        return run

    return around


@dataclass(frozen=True)
class _Before:
    values: list[Tensor]
    """Of the ranks before this one that have elements."""
    every: list[Tensor]

    def met_by(self, y: Tensor) -> Tensor:
        """``y``, whose backward, and that of its gradient, meets the other ranks' also where this one needs none of them."""
        return meeting(y, self.every)


def _before(last: Tensor, pieces: Pieces) -> _Before:
    every = across.of_each(last, pieces.spec, pieces.mesh_dims)
    return _Before([every[i] for i in range(pieces.own) if pieces.sizes[i]], every)


def _last(y: Tensor, local: Tensor, dim: int) -> Tensor:
    """The last slice; zeros, which nobody uses, of a piece without elements."""
    if 0 not in y.shape:
        return _end(y, dim)
    platform = get_platform()
    shape = (*y.shape[:dim], 1, *y.shape[dim + 1 :])
    return zeros_from(platform.zeros(shape, y.dtype, platform.device_of(y)), [local])


def _end(y: Tensor, dim: int) -> Tensor:
    return get_platform().narrow(y, dim, y.shape[dim] - 1, 1)


def _scan_of_one(scan: Call, local: Tensor) -> Any:
    """What the operation gives for one element, for its dtypes and its kind of tuple."""
    platform: Any = get_platform()
    with platform.no_grad():
        return scan(platform.zeros((1,) * len(local.shape), local.dtype, platform.device_of(local)))


def _none_like(x: Tensor, local: Tensor) -> Tensor:
    """No elements, as ``local`` has, of the dtype of ``x``."""
    platform = get_platform()
    return platform.zeros(tuple(local.shape), x.dtype, platform.device_of(local))


# ------------------------------------------------------------------------------------------------------- the best of the best
def is_worth_it(pieces: Pieces, k: int) -> bool:
    """Whether ``k`` candidates of each rank, a value and a place of 8 bytes, are less than its piece."""
    return 4 * k <= max(pieces.sizes)


def best_of_ranks(pieces: Pieces) -> Callable[[Call], Call]:
    """What runs for ``topk(x, k, dim, ...)``: every rank's own best, and the best of these, on all ranks.

    Communication: two all-gathers per mesh dim, of ``k`` values and places per rank. Of equal values the framework says not
    which are taken, and neither is said here; the places are always those of the values.
    """

    def around(function: Call) -> Call:
        def run(local: Tensor, k: int, _: int = -1, *order: Any, **named: Any) -> Any:
            platform, dim = get_platform(), pieces.dim
            counts = [min(k, size) for size in pieces.sizes]
            own = counts[pieces.own]
            if own and 0 not in local.shape:
                values, at = function(platform.detach(local), own, dim, *order, **named)
            else:
                values = platform.narrow(platform.detach(local), dim, 0, 0)
                at = platform.zeros(tuple(values.shape), "int64", platform.device_of(local))
            values, at = (_of_all(x, pieces, counts, max(counts)) for x in (values, at + pieces.offset))
            found = function(values, k, dim, *order, **named)
            best, which = found
            place = _taken(at, dim, which)
            return rebuilt(found, [_from_own(local, best, place, pieces), place])

        return run

    return around


def _of_all(own: Tensor, pieces: Pieces, counts: Sequence[int], most: int) -> Tensor:
    """The ranks' candidates along the dim; those of ranks with fewer are sent among zeros, and taken out again."""
    platform, dim = get_platform(), pieces.dim
    missing = most - own.shape[dim]
    if missing:
        shape = (*own.shape[:dim], missing, *own.shape[dim + 1 :])
        own = platform.cat([own, platform.zeros(shape, own.dtype, platform.device_of(own))], dim)
    every = across.of_each(own, pieces.spec, pieces.mesh_dims)
    return platform.cat([platform.narrow(x, dim, 0, n) for x, n in zip(every, counts, strict=True) if n], dim)


def _from_own(local: Tensor, best: Tensor, place: Tensor, pieces: Pieces) -> Tensor:
    """``best``, whose gradient goes to the rank that has the value."""
    platform = get_platform()
    if not (platform.is_grad_enabled() and platform.requires_grad(local)):
        return best
    if 0 in local.shape:
        return best + zeros_from(best, [local])
    mine = (place >= pieces.offset) & (place < pieces.offset + pieces.size)
    own = _taken(local, pieces.dim, platform.where(mine, place - pieces.offset, platform.zeros_like(place)))
    return platform.where(mine, own, best)


def _taken(x: Tensor, dim: int, at: Tensor) -> Tensor:
    """``gather(x, dim, at)`` where all other dims agree."""
    platform = get_platform()
    lines = platform.transpose(x, dim, -1)
    places = platform.transpose(at, dim, -1)
    count = 1
    for n in lines.shape[:-1]:
        count = count * n
    starts = platform.arange(0, count, device=platform.device_of(x)) * lines.shape[-1]
    rows = platform.reshape(places, (count, places.shape[-1])) + platform.reshape(starts, (count, 1))
    found = platform.reshape(lines, (-1,))[platform.reshape(rows, (-1,))]
    return platform.transpose(platform.reshape(found, tuple(places.shape)), dim, -1)
