"""The reduction of a unit whose parameters are DTensors that stay: see [Note: compat] in :mod:`hp_fsdp.summands`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from hp_fsdp.parameter import ManagedParameter
from hp_fsdp.reduce import Wishes
from hp_fsdp.shard_gradients import ShardGradients
from hp_fsdp.streams import Streams, Task
from hp_fsdp.summands import Dims
from hp_platform import collectives
from hp_platform.group import ProcessGroup
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor


class _Piece(NamedTuple):
    """What this rank adds to the gradient of one parameter, 1-D."""

    dims: Dims
    groups: tuple[ProcessGroup, ...]
    at: int
    """Of the parameter, among the unit's."""
    values: Tensor


class _Row:
    """Pieces of one dtype one after the other. Those that are added up along the same mesh dims are one segment."""

    def __init__(self, platform: Platform, pieces: list[_Piece], *, writes_views: bool) -> None:
        self.platform = platform
        # So the segments that a mesh dim adds up lie one behind the other, as far as that is possible.
        self.pieces = sorted(pieces, key=lambda piece: (piece.dims, piece.at))
        self.sizes = [piece.values.shape[0] for piece in self.pieces]
        groups: list[tuple[ProcessGroup, ...]] = []
        self._lengths: list[int] = []
        """Of the segments."""
        for each, members in groupby(self.pieces, key=lambda piece: piece.groups):
            groups.append(each)
            self._lengths.append(sum(piece.values.shape[0] for piece in members))
        self.runs = _runs(groups)
        values = [piece.values for piece in self.pieces]
        row = platform.clone(values[0]) if len(values) == 1 else platform.cat(values)
        self._row = row if writes_views else None
        self._segments: list[Tensor] = platform.split(row, self._lengths)

    def add_up(self, run: _Run, async_op: bool) -> Callable[[], None]:
        """One all-reduce; what has to follow it."""
        platform = self.platform
        if self._row is not None:
            start = sum(self._lengths[: run.begin])
            part = platform.narrow(self._row, 0, start, sum(self._lengths[run.begin : run.end]))
            work: Any = collectives.all_reduce(part, run.group, "sum", out=part, async_op=async_op)
            return work.wait if async_op else _nothing
        joined = platform.cat(self._segments[run.begin : run.end])
        result: Any = collectives.all_reduce(joined, run.group, "sum", async_op=async_op)

        def follow() -> None:
            found = result.wait() if async_op else result
            self._segments[run.begin : run.end] = platform.split(found, self._lengths[run.begin : run.end])

        return follow

    def sums(self) -> list[Tensor]:
        """Of all ranks, one per piece."""
        row = self.platform.cat(self._segments) if self._row is None else self._row
        return self.platform.split(row, self.sizes)


class _Run(NamedTuple):
    """Segments that lie one behind the other and are added up over the same group."""

    group: ProcessGroup
    begin: int
    end: int


def _runs(segments: Sequence[tuple[ProcessGroup, ...]]) -> list[_Run]:
    found: list[_Run] = []
    for group in dict.fromkeys(group for groups in segments for group in groups):
        members = [at for at, groups in enumerate(segments) if group in groups]
        begins = [at for at in members if at - 1 not in members]
        ends = [at + 1 for at in members if at + 1 not in members]
        found.extend(_Run(group, begin, end) for begin, end in zip(begins, ends, strict=True))
    return found


def _nothing() -> None:
    """Follows a collective that has written where it should."""


class Summation:
    """The sums of the gradients of a unit's parameters, from their launch until they are in ``.grad``."""

    def __init__(
        self, streams: Streams, params: Sequence[ManagedParameter], wishes: Wishes, target: ShardGradients
    ) -> None:
        self.platform: Platform = streams.platform
        self.streams = streams
        self.params = params
        self.wishes = wishes
        self.target = target
        self._task: Task | None = None
        self._totals: list[Tensor | None] = []
        """Per parameter what is whole already."""
        self._rows: list[_Row] = []
        self._is_dropped = False

    def launch(self) -> None:
        """Take the gradients and send the summands.

        Communication: for each mesh dim along which parameters are used differently, and each dtype, one all-reduce of the
        summands of those parameters (more in meshes of three dims and more, if sets of dims cross).
        """
        platform, async_op = self.platform, self.streams.async_op
        self._totals = [param.take_gradient() for param in self.params]
        by_dtype: dict[Any, list[_Piece]] = {}
        for at, param in enumerate(self.params):
            for dims, groups, summand in param.summands.take() if param.summands is not None else ():
                flat = platform.reshape(summand, (-1,))
                if flat.shape[0]:
                    by_dtype.setdefault(flat.dtype, []).append(_Piece(dims, groups, at, flat))
                elif self._totals[at] is None:
                    self._totals[at] = flat
        writes_views = platform.supports("write_into_view", self.target.places.device)
        rows = [_Row(platform, pieces, writes_views=writes_views) for pieces in by_dtype.values()]
        self._rows = rows

        def start() -> Callable[[], None]:
            follows = [row.add_up(row.runs[0], async_op) for row in rows]

            def follow() -> None:
                for each in follows:
                    each()
                for row in rows:
                    for run in row.runs[1:]:
                        row.add_up(run, False)()

            return follow

        self._task = self.streams.run(self.streams.reduce, start)

    def finish(self) -> None:
        """Gradients are there for what the computation does next."""
        if self._task is None:
            return
        self._task.wait()
        self._task = None
        if not self._is_dropped:
            self._give()
        self._totals, self._rows = [], []

    def drop(self) -> None:
        """What is not among the gradients yet is not wanted any more; :meth:`finish` only waits."""
        self._is_dropped = True

    def deliver(self) -> None:
        """Nothing is on its way to the host."""

    def _give(self) -> None:
        platform = self.platform
        totals = [None if x is None else platform.reshape(x, (-1,)) for x in self._totals]
        for row in self._rows:
            for piece, total in zip(row.pieces, row.sums(), strict=True):
                before = totals[piece.at]
                totals[piece.at] = total if before is None else before + total
        found = [(param, x) for param, x in zip(self.params, totals, strict=True) if x is not None]
        if self.wishes.factor is not None:
            found = [(param, x * self.wishes.factor) for param, x in found]
        self.target.add([param for param, _ in found], [x for _, x in found])
