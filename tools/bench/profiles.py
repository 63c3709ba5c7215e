"""Where the time of a training step on a GPU goes: by kind of kernel, by interval arithmetic over all streams.

[Note: waiting is no communication] A collective is a kernel that begins when its rank comes to it and ends when all ranks have sent and
received, so on the ranks that come early it lasts longer: by what the others' hosts or kernels were late. The last one to come waits for
nobody. So of every collective, matched by name and order between the ranks, the shortest duration of all ranks counts, at its
end; what comes before is waiting. Copies by engines wait for nobody and count whole.

The trace is the chrome trace that torch.profiler writes. Kernels are told apart by their names, so a kind holds what the
model itself does of it too (it casts its logits, and puts the halves of rotary features together): a trace of the same model
without sharding shows how much that is.
"""

from __future__ import annotations

import enum
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

Interval = tuple[float, float]
"""From, to: in microseconds."""
CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
"""Of the events of a trace that keep the GPU busy."""
NUM_HEAVIEST, NUM_GAPS = 24, 8


class Kind(enum.Enum):
    """What a kernel is for."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    OTHER = "other"
    COPIES = "packing, copies"
    CASTS = "casts"
    ADAMW = "AdamW"
    GATHER = "gather"
    REDUCE = "reduce"


COMMUNICATION = frozenset({Kind.GATHER, Kind.REDUCE})
# The first that applies counts: a kernel of NCCL is named after its collective, one of attention may be built of gemms.
# Copies between GPUs ("PtoP") are gathers and exchanges by the copy engines. Names are compared in lower case.
RULES: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    (
        Kind.REDUCE,
        ("reducescatter", "sendrecv", "allreduce", "reduce_scatter", "all_reduce", "onerankreduce"),
    ),
    (Kind.GATHER, ("nccl", "allgather", "all_gather", "memcpy ptop", "barrier_kernel")),
    (Kind.ADAMW, ("adam",)),
    (Kind.ATTENTION, ("flash", "fmha", "sdpa", "attention")),
    (Kind.MATMUL, ("nvjet", "gemm", "xmma", "cutlass", "splitk", "gemv", "product_kernel")),
    (Kind.COPIES, ("chunk_cat", "split_with_sizes", "catarray", "memcpy")),
    # Elementwise copies: from float32 to a half by a kernel of that name, other casts by the variant without "nocast".
    (
        Kind.CASTS,
        ("withcast", "float16_copy", "bfloat16tofloat32", "gpu_kernel_impl<at::native::direct_copy"),
    ),
    (Kind.COPIES, ("copy_kernel",)),
)


@dataclass(frozen=True)
class Activity:
    """Something the GPU did."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Profile:
    """Milliseconds of one step. What runs beside something else counts in both kinds."""

    span: float
    """From the first activity to the last."""
    busy: dict[Kind, float]
    """While at least one activity of the kind ran."""
    exposed: float
    """While communication ran, and nothing else; see [Note: waiting is no communication]."""
    idle: float
    """While nothing ran."""
    waiting: float = 0.0
    """While collectives waited for other ranks, and nothing else ran."""
    heaviest: tuple[tuple[str, str, float], ...] = ()
    """Kernels that took most: name, kind, sum of their durations."""
    gaps: tuple[tuple[float, str, str], ...] = ()
    """The longest times without computation in all steps: each one's milliseconds, what ran before, and what after."""

    @classmethod
    def of(
        cls,
        activities: Sequence[Activity],
        num_steps: int,
        shortest: Mapping[str, Sequence[float]] | None = None,
    ) -> Profile:
        """The mean over the steps that the activities belong to. ValueError if there are none.

        ``shortest``: of :func:`shortest_of` all ranks' :func:`durations_of`; without it all of a collective is communication.
        """
        if not activities or num_steps < 1:
            raise ValueError(
                f"{len(activities)} activities of a GPU in {num_steps} steps: a profile needs at least one of each"
            )
        scale = 1e-3 / num_steps
        by_kind: dict[Kind, list[Interval]] = defaultdict(list)
        sums: dict[str, float] = defaultdict(float)
        all_busy = union((each.start, each.end) for each in activities)
        activities = without_waiting(activities, shortest or {})
        for each in activities:
            by_kind[kind_of(each.name)].append((each.start, each.end))
            sums[each.name] = sums[each.name] + each.end - each.start
        computing = union(x for kind, xs in by_kind.items() if kind not in COMMUNICATION for x in xs)
        moving = union(x for xs in by_kind.values() for x in xs)
        heaviest = sorted(sums, key=lambda name: -sums[name])
        span = all_busy[-1][1] - all_busy[0][0]
        return cls(
            span=span * scale,
            busy={kind: length(union(by_kind[kind])) * scale for kind in Kind},
            exposed=(length(moving) - length(computing)) * scale,
            idle=(span - length(all_busy)) * scale,
            waiting=(length(all_busy) - length(moving)) * scale,
            heaviest=tuple(
                (name, kind_of(name).value, sums[name] * scale) for name in heaviest[:NUM_HEAVIEST]
            ),
            gaps=_largest_gaps(activities, computing),
        )

    @classmethod
    def read(cls, trace: Path, num_steps: int) -> Profile:
        """The profile of a chrome trace, packed by gzip or not."""
        return cls.of(read_activities(trace), num_steps)

    def cells(self) -> tuple[str, ...]:
        """As a line of a table under COLUMNS."""
        kinds = (self.busy.get(kind, 0.0) for kind in Kind)
        values = (self.span, *kinds, self.exposed, self.waiting, self.idle)
        return tuple(f"{value:.1f}" for value in values)


COLUMNS = ("span", *(kind.value for kind in Kind), "exposed", "waiting", "idle")


def durations_of(activities: Sequence[Activity]) -> dict[str, list[float]]:
    """Of the collectives of a rank, by name: how long each lasted, in the order in which they began."""
    found: dict[str, list[float]] = defaultdict(list)
    for each in sorted(activities, key=lambda each: each.start):
        if _is_collective(each.name):
            found[each.name].append(each.end - each.start)
    return dict(found)


def shortest_of(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """The shortest of the ranks' durations of each collective. Names that not all ranks have equally often are left out."""
    first, *others = ranks
    return {
        name: [min(each) for each in zip(durations, *(other[name] for other in others), strict=True)]
        for name, durations in first.items()
        if all(len(other.get(name, ())) == len(durations) for other in others)
    }


def without_waiting(
    activities: Sequence[Activity], shortest: Mapping[str, Sequence[float]]
) -> list[Activity]:
    """Of each collective only its end, as long as its shortest duration; by the time at which they began."""
    counts: dict[str, int] = defaultdict(int)
    found = []
    for each in sorted(activities, key=lambda each: each.start):
        if each.name in shortest:
            duration = shortest[each.name][counts[each.name]]
            counts[each.name] = counts[each.name] + 1
            found.append(replace(each, start=max(each.start, each.end - duration)))
        else:
            found.append(each)
    return found


def _is_collective(name: str) -> bool:
    return kind_of(name) in COMMUNICATION and "memcpy" not in name.lower()


def _largest_gaps(
    activities: Sequence[Activity], computing: Sequence[Interval]
) -> tuple[tuple[float, str, str], ...]:
    starting = {each.start: each.name for each in activities if kind_of(each.name) not in COMMUNICATION}
    ending = {each.end: each.name for each in activities if kind_of(each.name) not in COMMUNICATION}
    gaps = sorted(
        ((after[0] - before[1], before[1], after[0]) for before, after in pairwise(computing)), reverse=True
    )
    return tuple((size * 1e-3, ending[end], starting[start]) for size, end, start in gaps[:NUM_GAPS])


def read_activities(trace: Path) -> list[Activity]:
    """What the GPU did, of a chrome trace, packed by gzip or not."""
    text = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    return activities_of(json.loads(text)["traceEvents"])


def activities_of(events: Iterable[dict]) -> list[Activity]:
    """What the GPU did, of all events of a chrome trace."""
    return [
        Activity(event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in CATEGORIES
    ]


def kind_of(name: str) -> Kind:
    """By the name of a kernel or a copy."""
    if (copied := _copied_dtypes(name)) is not None:
        return Kind.COPIES if len(copied) == 1 else Kind.CASTS
    lower = name.lower()
    for kind, marks in RULES:
        if any(mark in lower for mark in marks):
            return kind
    return Kind.OTHER


def _copied_dtypes(name: str) -> set[str] | None:
    """From and to which dtypes a copy of a list of tensors goes; None: it is none. (`CopyFunctor<float, c10::BFloat16, ...`)"""
    _, mark, rest = name.partition("CopyFunctor<")
    if not mark:
        return None
    return {part.strip() for part in rest.split(",")[:2]}


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points of time, in intervals that neither overlap nor touch, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)
