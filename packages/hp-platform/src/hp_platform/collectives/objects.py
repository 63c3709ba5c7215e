"""Python objects between ranks, pickled into byte tensors. Slow, and for objects of trusted ranks only: unpickling runs code."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from hp_platform.collectives._launch import check_member, resolve
from hp_platform.collectives.gather import all_gather, all_gather_uneven, broadcast
from hp_platform.group import ProcessGroup
from hp_platform.platform import Platform, get_platform
from hp_platform.process_groups import world_device
from hp_platform.protocols.tensor import Tensor


def all_gather_object(obj: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Every rank's object, by rank. Communication: an all-gather of the lengths (8 bytes a rank), and one of the pickles."""
    platform, group = get_platform(), resolve(group)
    if group.size == 1:
        return [obj]
    mine = _pack(platform, obj)
    lengths = all_gather(platform.tensor([mine.shape[0]], "int64", platform.device_of(mine)), group)
    sizes = [int(n) for n in platform.to_numpy(lengths)]
    return [_unpack(platform, x) for x in all_gather_uneven(mine, sizes, group)]


def broadcast_object(obj: Any, src: int, group: ProcessGroup | None = None) -> Any:
    """Global rank ``src``'s object, on all ranks; ``obj`` is not read elsewhere. Communication: two broadcasts (length, pickle)."""
    platform, group = get_platform(), resolve(group)
    check_member(group, src, "src")
    if group.size == 1:
        return obj
    here = group.global_rank == src
    device = world_device()
    packed = _pack(platform, obj) if here else None
    length = platform.tensor([packed.shape[0] if packed is not None else 0], "int64", device)
    size = int(platform.to_numpy(broadcast(length, src, group))[0])
    data = packed if packed is not None else platform.empty((size,), "uint8", device)
    got = broadcast(data, src, group)
    return obj if here else _unpack(platform, got)


def gather_object(obj: Any, dst: int, group: ProcessGroup | None = None) -> list[Any] | None:
    """Every rank's object on global rank ``dst``, None elsewhere. Communication: as :func:`all_gather_object`."""
    group = resolve(group)
    check_member(group, dst, "dst")
    objects = all_gather_object(obj, group)
    return objects if group.global_rank == dst else None


def scatter_object(objects: Sequence[Any] | None, src: int, group: ProcessGroup | None = None) -> Any:
    """This rank's entry of global rank ``src``'s list, one per rank. Communication: as :func:`broadcast_object` of the list."""
    group = resolve(group)
    check_member(group, src, "src")
    if group.global_rank == src and (objects is None or len(objects) != group.size):
        given = "None" if objects is None else f"{len(objects)} objects"
        raise ValueError(
            f"the source of a scatter gives one object per rank: got {given} for the {group.describe()}"
        )
    return broadcast_object(objects, src, group)[group.rank]


def _pack(platform: Platform, obj: Any) -> Tensor:
    import numpy as np

    data = np.frombuffer(pickle.dumps(obj), dtype=np.uint8)
    return platform.tensor(data.copy(), "uint8", world_device())


def _unpack(platform: Platform, x: Tensor) -> Any:
    return pickle.loads(platform.to_numpy(x).tobytes())  # the peers are ranks of the same job
