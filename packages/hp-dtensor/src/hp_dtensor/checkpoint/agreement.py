"""All ranks agree on what a save consists of: one small all-gather where every rank has the same state.

[Note: planning without talking] Every rank knows the specs of all its tensors, so it knows the pieces of all ranks. Where
all ranks describe the same state, which a hash of the descriptions tells, each makes the same plan for itself. Where they do
not (stages of a pipeline, meshes that are rows of a larger one), or a tensor lies in runs instead of boxes, they send each
other what they hold, and plan from that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_dtensor.checkpoint.boxes import Box, whole
from hp_dtensor.checkpoint.nest import FlatState
from hp_dtensor.checkpoint.sources import Source, boxes_of_ranks, placed
from hp_platform import collectives, get_platform, get_rank, get_world_size, is_initialized, launch
from hp_platform.process_groups import ensure_initialized, world_device

FAILED = -1
"""Said instead of a number by a rank that cannot take part."""


@dataclass
class Tensor:
    """A tensor of the whole job: its pieces, and who holds them."""

    code: str
    shape: tuple[int, ...]
    holders: dict[Box, list[int]] = field(default_factory=dict)


@dataclass
class State:
    """The state of the whole job."""

    root: str
    order: list[str] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def join(sources: Mapping[str, Source]) -> tuple[int, int]:
    """This process' rank, and the number of processes; joins the job's default group if nothing has done so yet.

    A mesh makes that group when it first communicates, so a state may be there before it. A process that no launcher has
    started is a job of its own.
    """
    if not is_initialized():
        launched = launch.environment()
        alone = launched is None or launched.world_size == 1
        platform = get_platform()
        if alone and platform.adopt_world() is None:
            return 0, 1
        kinds = (platform.device_of(source.local).partition(":")[0] for source in sources.values())
        ensure_initialized(next(kinds, None))
    return get_rank(), get_world_size()


def tell(number: int, digest: int, world_size: int) -> list[tuple[int, int]]:
    """Every rank's pair of numbers, by rank. Communication: one all-gather of 16 bytes a rank, none if there is one rank."""
    if world_size == 1:
        return [(number, digest)]
    platform = get_platform()
    mine = platform.tensor([[number, digest]], "int64", world_device())
    return [(int(n), int(d)) for n, d in platform.to_numpy(collectives.all_gather(mine)).tolist()]


def digest_of(flat: FlatState, sources: Mapping[str, Source]) -> int:
    """A hash of everything that ranks must have alike to plan without talking. Below 2**63."""
    described = [
        flat.root,
        list(flat.kinds.items()),
        [
            [name, placed(sources[name]) if leaf.is_tensor else ["value", leaf.value]]
            for name, leaf in flat.leaves.items()
        ],
    ]
    return _hash(described)


def digest_of_shapes(sources: Mapping[str, Source]) -> int:
    """A hash of names, dtypes and global shapes, however they lie. Below 2**63."""
    return _hash([[name, source.code, source.shape] for name, source in sources.items()])


def _hash(described: Any) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(described).encode()).digest()[:8], "little") >> 1


def known_state(flat: FlatState, sources: Mapping[str, Source], world_size: int) -> State:
    """The job's state where every rank has the same. No communication."""
    state = State(flat.root, list(flat.leaves), dict(flat.kinds), _values(flat))
    everyone = list(range(world_size))
    of_specs = {spec: boxes_of_ranks(spec) for spec in {s.spec for s in sources.values()} if spec is not None}
    for name, source in sources.items():
        holders = {whole(source.shape): everyone} if source.spec is None else of_specs[source.spec]
        state.tensors[name] = Tensor(source.code, source.shape, holders)
    return state


def gathered_state(flat: FlatState, sources: Mapping[str, Source], world_size: int) -> State:
    """The job's state where ranks have different ones. Communication: a gather of descriptions (about 100 bytes a tensor)."""
    held = {name: (s.code, s.shape, [part.box for part in s.parts]) for name, s in sources.items()}
    mine = (flat.root, list(flat.leaves), dict(flat.kinds), _values(flat), held)
    return merged(collectives.all_gather_object(mine) if world_size > 1 else [mine])


def merged(
    of_ranks: Sequence[tuple[str, list[str], dict[str, str], dict[str, Any], dict[str, Any]]],
) -> State:
    """One state of what the ranks describe. ValueError if two of them mean different things by one name."""
    state = State(of_ranks[0][0])
    first: dict[str, int] = {}
    for rank, (root, order, kinds, values, held) in enumerate(of_ranks):
        _same("the state", "kind", state.root, root, 0, rank)
        for name, kind in kinds.items():
            _same(name, "kind", state.kinds.setdefault(name, kind), kind, first.setdefault(name, rank), rank)
        for name in order:
            if name not in first:
                first[name] = rank
                state.order.append(name)
            if name in (state.tensors if name in values else state.values):
                raise ValueError(
                    f"{name} is a tensor on one of the ranks {first[name]} and {rank} and a value on the other; a checkpoint "
                    f"has one of each name: give them two names"
                )
            if name in values:
                known = state.values.setdefault(name, values[name])
                _same(name, "value", [known], [values[name]], first[name], rank)
                continue
            code, shape, boxes = held[name]
            tensor = state.tensors.setdefault(name, Tensor(code, shape))
            _same(name, "dtype and shape", (tensor.code, tensor.shape), (code, shape), first[name], rank)
            for box in boxes:
                tensor.holders.setdefault(box, []).append(rank)
    for name in (*state.order, *state.kinds):
        inner = [name[:end] for end, letter in enumerate(name) if letter == "/"]
        for outer in (*inner, *([name] if name in state.kinds else [])):
            if outer in state.tensors or outer in state.values:
                raise ValueError(
                    f"{outer} is a tensor or a value on rank {first[outer]} and holds further names on another rank: a "
                    f"checkpoint has one of each name, so give it another name there"
                )
    return state


def _values(flat: FlatState) -> dict[str, Any]:
    return {name: leaf.value for name, leaf in flat.leaves.items() if not leaf.is_tensor}


def _same(name: str, what: str, known: Any, given: Any, first: int, rank: int) -> None:
    if repr(known) != repr(given):
        raise ValueError(
            f"{name} differs between ranks: {what} {known} on rank {first}, {given} on rank {rank}; a checkpoint has one of each "
            f"name: make it equal, or put each rank's own under a name with its rank"
        )
