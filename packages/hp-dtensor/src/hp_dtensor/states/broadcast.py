"""Whole values that only one rank has, sent to all others, one at a time.

The rank that has them first announces what they are (names, shapes, dtypes, and all values that are no tensors). So every
rank can check everything before a tensor travels, and one that must refuse tells the others, who would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from hp_dtensor.native import DTensor
from hp_dtensor.states.values import device_of_mesh
from hp_platform import collectives, process_groups
from hp_platform.group import ProcessGroup
from hp_platform.platform import Platform, get_platform
from hp_platform.protocols.tensor import Tensor
from hp_platform.subgroups import group_of

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, eq=False)
class Announced:
    """A tensor that is still to come. Names with the same object will get the same tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Home:
    """The ranks that a model lies on."""

    group: ProcessGroup | None
    """None: this rank alone."""
    source: int
    """The lowest of them, which stands for all where one does: global rank 0 if the model lies on the whole world."""
    device: str
    """Where tensors travel."""

    @property
    def is_source(self) -> bool:
        """Whether this rank is the one."""
        return self.group is None or self.group.global_rank == self.source


def home_of(platform: Platform, tensors: Iterable[Any]) -> Home:
    """The ranks of the largest mesh among the tensors, which must hold all others; without DTensors the world.

    ValueError if no mesh holds all others.
    """
    meshes = {x.device_mesh for x in tensors if isinstance(x, DTensor)}
    if not meshes:
        if not process_groups.is_initialized():
            return Home(None, 0, "cpu")
        world = process_groups.get_world()
        return Home(world if world.size > 1 else None, world.ranks[0], process_groups.world_device())
    largest = max(meshes, key=lambda mesh: len(mesh.rank_list))
    for mesh in meshes:
        if not set(mesh.rank_list) <= set(largest.rank_list):
            raise ValueError(
                f"the model lies on {mesh} and on {largest}, and neither holds the other: read and load its parts one by one"
            )
    ranks = sorted(set(largest.rank_list))
    device = device_of_mesh(platform, largest)
    if len(ranks) == 1:
        return Home(None, ranks[0], device)
    process_groups.ensure_initialized(largest.device_type)
    return Home(group_of(ranks), ranks[0], device)


def announce(
    platform: Platform, values: Mapping[K, Any], home: Home, problem: Exception | None = None
) -> dict[K, Any]:
    """The source's values, on all ranks: its tensors as :class:`Announced`, anything else as it is.

    ``problem``: why the source has no values to give. It is raised there, and on all other ranks an error of its kind (RuntimeError for
    others than ValueError, TypeError and RuntimeError) with its text. Of other ranks it does not count.

    Communication: two broadcasts, of some 100 bytes a name. ValueError on all ranks if the source has sharded tensors.
    """
    announced: dict[K, Any] = {}
    if home.is_source and problem is None:
        try:
            announced = _described(platform, values)
        except ValueError as error:
            problem = error
    told = (_told(problem), announced)
    if home.group is not None:
        told = collectives.broadcast_object(told, home.source, home.group)
    if home.is_source and problem is not None:
        raise problem
    reason, announced = told
    if reason is not None:
        kind, text = reason
        raise _KINDS.get(kind, RuntimeError)(f"rank {home.source}, which has the values, cannot load: {text}")
    return announced


_KINDS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError)}
"""Errors that ranks raise for another one."""


def _told(problem: Exception | None) -> tuple[str, str] | None:
    """Name of the kind, and text. The error itself might not be made again elsewhere."""
    if problem is None:
        return None
    kind = next((each for each in _KINDS.values() if isinstance(problem, each)), None)
    if kind is None:
        return "", f"{type(problem).__name__}: {problem}"
    return kind.__name__, str(problem)


def _described(platform: Platform, values: Mapping[K, Any]) -> dict[K, Any]:
    announced: dict[K, Any] = {}
    known: dict[tuple[Any, ...], Announced] = {}
    for key, value in values.items():
        if isinstance(value, DTensor):
            raise ValueError(
                f"broadcast_from_rank0=True takes whole tensors, {key!r} is a DTensor: give its full_tensor(), or load "
                "shards without broadcast_from_rank0"
            )
        if not platform.is_tensor(value):
            announced[key] = value
            continue
        found = Announced(tuple(value.shape), platform.dtype_name(value.dtype))
        memory = (platform.data_ptr(value), found.shape, found.dtype, platform.device_of(value))
        # Of tied parameters the same memory stands under several names: it travels once. (Views of other strides are rare.)
        is_same = platform.is_contiguous(value) and 0 not in found.shape
        announced[key] = known.setdefault(memory, found) if is_same else found
    return announced


def agree(problem: Exception | None, home: Home, what: str) -> None:
    """Raise the problem, or RuntimeError if another rank has one. Communication: one all-gather of 8 bytes a rank."""
    platform = get_platform()
    if home.group is None:
        if problem is not None:
            raise problem
        return
    mine = platform.tensor([0 if problem is None else 1], "int64", home.device)
    flags = platform.to_numpy(collectives.all_gather(mine, home.group)).tolist()
    if problem is not None:
        raise problem
    failed = [str(rank) for rank, flag in zip(home.group.ranks, flags, strict=True) if flag]
    if failed:
        raise RuntimeError(
            f"{what}: rank {', '.join(failed)} cannot load, and says why in an error of its own; nothing was written"
        )


def send(
    platform: Platform,
    announced: Mapping[K, Any],
    values: Mapping[K, Any],
    home: Home,
    receive: Callable[[list[K], Tensor], None],
) -> None:
    """``receive(names, whole tensor)`` on all ranks, for one announced tensor after the other.

    Each is on the device of the home and is freed before the next one comes, if ``receive`` keeps nothing of it.
    Communication: one broadcast of each tensor's bytes.
    """
    names: dict[int, list[K]] = {}
    for key, found in announced.items():
        if isinstance(found, Announced):
            names.setdefault(id(found), []).append(key)
    for keys in names.values():
        receive(keys, _arrived(platform, announced[keys[0]], values, keys[0], home))


def _arrived(platform: Platform, announced: Announced, values: Mapping[K, Any], key: K, home: Home) -> Tensor:
    if home.is_source:
        whole = platform.to_device(platform.contiguous(platform.detach(values[key])), home.device)
    else:
        whole = platform.empty(announced.shape, announced.dtype, home.device)
    if home.group is not None:
        # Into the very tensor: a result of its own would be a second whole one.
        collectives.broadcast(whole, home.source, home.group, out=whole)
    return whole
