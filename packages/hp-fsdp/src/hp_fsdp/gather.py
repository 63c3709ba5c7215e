"""From rows to whole parameters: one all-gather per dtype, read from the buffers as they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hp_fsdp.buffer import FlatBuffer
from hp_fsdp.parameter import ManagedParameter
from hp_fsdp.places import Places
from hp_platform import collectives
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import DType, Tensor


def gather_columns(
    platform: Platform,
    buffers: Sequence[FlatBuffer],
    places: Places,
    dtype_of: Callable[[DType], DType],
) -> list[tuple[ManagedParameter, Tensor]]:
    """Every sharded parameter with its chunks, one line per rank: ``(ranks, slot.numel)``, a view of what was gathered.

    ``dtype_of(original)`` is the dtype in which a buffer travels. Communication: one all-gather over the shard group for
    each of those dtypes, ``ranks * row`` elements; none if the group has one rank.
    """
    found: list[tuple[ManagedParameter, Tensor]] = []
    for dtype, together in _by_dtype(buffers, dtype_of).items():
        rows = platform.foreach_cast([buffer.row() for buffer in together], dtype)
        row = rows[0] if len(rows) == 1 else platform.cat(rows)
        gathered = collectives.all_gather(row, places.shard_group)
        numel = sum(buffer.plan.numel for buffer in together)
        matrix = platform.reshape(gathered, (places.num_shards, numel))
        start = 0
        for buffer in together:
            for param, slot in zip(buffer.params, buffer.plan.slots, strict=True):
                found.append((param, platform.narrow(matrix, 1, start + slot.offset, slot.numel)))
            start = start + buffer.plan.numel
    return found


def _by_dtype(
    buffers: Sequence[FlatBuffer], dtype_of: Callable[[DType], DType]
) -> dict[DType, list[FlatBuffer]]:
    groups: dict[DType, list[FlatBuffer]] = {}
    for buffer in buffers:
        groups.setdefault(dtype_of(buffer.dtype), []).append(buffer)
    return groups
