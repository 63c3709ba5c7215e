"""What is worked out once of an optimizer's parameters: their matrices, who owns them, and in which batches they travel.

[Note: gradients that are missing] A parameter without a gradient is left out of the step, with its momentum and its decay. Ranks
that exchange matrices must leave out the same ones. So whenever a rank meets a combination for the first time, it tells the
ranks that it shares parameters with; where they have another one all of them raise, and name the parameter. Later steps with
the same combination tell nobody anything. Parameters that are not exchanged (plain ones, experts that one rank holds) may
have a gradient or not on every rank by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hp_dtensor.spec import Spec, shown
from hp_optim.muon.batches import Batch, Lane, batches_of
from hp_optim.muon.devices import Devices
from hp_optim.muon.kinds import Kind, Transform
from hp_optim.muon.matrices import Matrix
from hp_optim.muon.newton_schulz import working_bytes
from hp_optim.muon.owners import Task
from hp_optim.muon.parts import Box, Sharing, alone, sharing_of
from hp_optim.muon.transform import transform_bytes
from hp_platform import CollectiveTimeoutError, ProcessGroup
from hp_platform.meeting import told
from hp_platform.platform import Platform
from hp_platform.process_groups import ensure_initialized
from hp_platform.protocols.tensor import DType
from hp_platform.subgroups import group_of

MOST_PLANS = 64
"""So many combinations of present gradients are remembered."""


@dataclass(frozen=True, eq=False)
class Known:
    """What does not change of a parameter, while the plan holds."""

    name: str
    spec: Spec | None
    """None for a plain tensor."""
    shape: tuple[int, ...]
    """Of the whole."""
    matrices: tuple[Matrix, ...]
    kind: Kind
    kept: DType
    """Of its momentum; without a momentum yet, of itself."""
    device: str
    storage: str
    rank: int

    @cached_property
    def boxes(self) -> tuple[tuple[Matrix, Box, Sharing], ...]:
        """Every matrix, and who holds it."""
        found = []
        for matrix in self.matrices:
            box = Box(matrix.offset, matrix.size)
            sharing = alone(box, self.shape, self.rank) if self.spec is None else sharing_of(self.spec, box)
            found.append((matrix, box, sharing))
        return tuple(found)

    @cached_property
    def is_exchanged(self) -> bool:
        """Whether some matrix of it is held by several ranks."""
        return any(len(sharing.holders) > 1 for _, _, sharing in self.boxes)

    @cached_property
    def lane(self) -> Lane:
        """What its matrices share with those that travel with them."""
        ranks = (self.rank,) if self.spec is None else tuple(sorted(self.spec.mesh.rank_list))
        return Lane(ranks, self.kept, self.kind.sent, self.kind.dtype, self.device, self.storage)

    def tasks(self, position: int, *, only_local: bool = False) -> list[Task]:
        """Of the parameter at ``position`` of the step."""
        return [
            Task(position, box, matrix.rows, matrix.cols, self.kind, sharing)
            for matrix, box, sharing in self.boxes
            if not (only_local and len(sharing.holders) > 1)
        ]


class Plans:
    """The batches of an optimizer, for every combination of gradients that it has met."""

    def __init__(self, platform: Platform, memory_cap: int) -> None:
        self._platform, self._memory_cap = platform, memory_cap
        self._known: Sequence[Known] = ()
        self._found: dict[tuple[int, ...], list[Batch]] = {}
        self._agreed: set[Any] = set()
        self.devices = Devices(platform)

    def batches(self, known: Sequence[Known], present: Sequence[int]) -> list[Batch]:
        """Those of the parameters ``present`` among all ``known`` ones, which are numbered in that order in cuts and tasks.

        Communication: at the first time with these, see [Note: gradients that are missing], through the key-value store.
        """
        if known is not self._known or len(self._found) >= MOST_PLANS:
            self._known = known
            self._found.clear()
        key = tuple(present)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._plan(known, present)
        return found

    def _plan(self, known: Sequence[Known], present: Sequence[int]) -> list[Batch]:
        groups = self._groups(known, frozenset(present))
        tasks = [
            (task, known[number].lane)
            for position, number in enumerate(present)
            for task in known[number].tasks(position)
        ]
        # What has no gradient here may have one on the rank that holds it alone; all ranks count it as that rank's work.
        absent = sorted(set(range(len(known))) - set(present))
        idle = [
            (task, known[number].lane)
            for number in absent
            for task in known[number].tasks(-1, only_local=True)
        ]
        return batches_of(tasks, idle, groups, known[0].rank, self._num_bytes, self._memory_cap)

    def _num_bytes(self, task: Task, lane: Lane) -> int:
        platform = self._platform
        bound = transform_bytes if isinstance(task.kind, Transform) else working_bytes
        return bound(
            (task.rows, task.columns), platform.itemsize(lane.sent), platform.itemsize(lane.computed)
        )

    def _groups(self, known: Sequence[Known], present: frozenset[int]) -> dict[tuple[int, ...], ProcessGroup]:
        """The group of every set of ranks that exchange, which have agreed on what is present."""
        by_ranks: dict[tuple[int, ...], list[int]] = {}
        for number, each in enumerate(known):
            if each.is_exchanged:
                by_ranks.setdefault(each.lane.ranks, []).append(number)
        groups = {}
        for ranks, numbers in by_ranks.items():
            spec = known[numbers[0]].spec
            assert spec is not None
            ensure_initialized(spec.mesh.device_type)
            groups[ranks] = group_of(ranks)
            lines = [self._line(known[number], number in present) for number in numbers]
            # Of the lines only a digest is kept: a model may go on meeting new combinations for ever.
            key = (ranks, hashlib.sha256("\n".join(lines).encode()).digest())
            if key not in self._agreed:
                agree(lines, groups[ranks])
                self._agreed.add(key)
        return groups

    def _line(self, each: Known, has_gradient: bool) -> str:
        """What the ranks must have in common."""
        assert each.spec is not None
        names = self._platform.dtype_name
        device, storage = each.device.partition(":")[0], each.storage.partition(":")[0]
        return (
            f"{each.name} of shape {each.shape} as {shown(each.spec.placements)}, in {len(each.matrices)} matrices, momentum in "
            f"{names(each.kept)} on {storage}, {each.kind.described} in {names(each.kind.dtype)} on {device}: "
            + ("with a gradient" if has_gradient else "without a gradient")
        )


def agree(lines: Sequence[str], group: ProcessGroup) -> None:
    """RuntimeError on all ranks of the group if one of them has other lines, with the first that differs."""
    text = "\n".join(lines)
    try:
        digests = told(hashlib.sha256(text.encode()).hexdigest(), group)
        if len(set(digests)) == 1:
            return
        texts = [found.split("\n") for found in told(text, group)]
    except CollectiveTimeoutError as error:
        raise CollectiveTimeoutError(
            f"Muon: rank {group.global_rank} steps with a combination of gradients that it has not met before, and waits for the "
            f"{group.describe()} to agree; a rank did not come: all ranks call step() alike, with gradients of the same "
            f"parameters. {error}"
        ) from error
    length = max(map(len, texts))
    padded = [[*found, *["nothing"] * (length - len(found))] for found in texts]
    at = next(place for place in range(length) if len({found[place] for found in padded}) > 1)
    said = "; ".join(f"rank {rank} has {found[at]}" for rank, found in zip(group.ranks, padded, strict=True))
    raise RuntimeError(
        f"Muon: the ranks that exchange matrices do not step alike. Parameter {at} of those that they share: {said}. Give all "
        "ranks the same parameters in the same order, and a gradient (zeros, where a rank has none) on all of them or on none"
    )
