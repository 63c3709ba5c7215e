"""From gradients of whole parameters to mean gradients of shards: one reduce-scatter per dtype.

[Note: what travels] The input of the reduce-scatter has one line per rank. A line holds the chunks of that rank's shards,
with their padding, and a tail that is the same in all lines: the gradients of scalars (which are replicated, so every rank
wants their mean), and one number per parameter, 1 if this rank has a gradient for it, else 0. So after one collective
every rank knows the mean gradients of its shards and of all scalars, and which parameters no rank has used.

[Note: unused parameters] A rank without a gradient sends zeros, as every rank takes part in every reduction whatever branch
it took. A parameter that no rank has used gets no gradient (None stays None), as in one process. The numbers that tell so
are read only where this rank has no gradient itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from hp_fsdp.parameter import ManagedParameter
from hp_fsdp.places import Places
from hp_platform import collectives
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import DType, Tensor


def average_gradients(platform: Platform, params: Sequence[ManagedParameter], places: Places) -> None:
    """Take the gradients of the whole parameters and add their mean over all ranks to the gradients of the shards.

    Communication, for each dtype in which gradients travel: one reduce-scatter over the shard group, then (2-D mesh) one
    all-reduce of a line over the replicate group.
    """
    groups: dict[DType, list[ManagedParameter]] = {}
    for param in params:
        groups.setdefault(param.wire_dtype, []).append(param)
    for dtype, together in groups.items():
        # Sharded ones first: their chunks are the line, the scalars its tail.
        ordered = sorted(together, key=lambda param: param.slot is None)
        _average(platform, ordered, places, dtype)


def _average(platform: Platform, params: Sequence[ManagedParameter], places: Places, dtype: DType) -> None:
    gradients = [param.take_gradient() for param in params]
    lines = _pack(platform, params, gradients, places, dtype)
    line = collectives.reduce_scatter(platform.reshape(lines, (-1,)), places.shard_group, "mean")
    if places.replicate_group is not None:
        line = collectives.all_reduce(line, places.replicate_group, "mean")
    sizes = [1 if param.slot is None else param.slot.numel for param in params]
    *pieces, used_anywhere = platform.split(line, [*sizes, len(params)])
    absent = [gradient is None for gradient in gradients]
    unused = platform.to_numpy(used_anywhere) == 0 if any(absent) else absent
    # A gradient that is part of a larger tensor cannot be written in place everywhere.
    whole = not platform.supports("write_into_view", places.device)
    for param, piece, skip in zip(params, pieces, unused, strict=True):
        if skip:
            continue
        shape = param.local_shape(places.shard_rank)
        if param.slot is not None:
            piece = platform.narrow(piece, 0, 0, param.slot.local_numel(places.shard_rank))
        gradient = platform.reshape(piece, shape)
        param.add_to_shard_gradient(platform.clone(gradient) if whole else gradient)


def _pack(
    platform: Platform,
    params: Sequence[ManagedParameter],
    gradients: Sequence[Tensor | None],
    places: Places,
    dtype: DType,
) -> Tensor:
    """The lines, ``(ranks, line)``; see [Note: what travels]."""
    blocks, tail = [], []
    for param, gradient in zip(params, gradients, strict=True):
        slot = param.slot
        if slot is None:
            one = platform.zeros((1, 1), dtype, places.device) if gradient is None else gradient
            tail.append(platform.reshape(one, (1, 1)))
        elif gradient is None:
            blocks.append(platform.zeros((slot.num_ranks, slot.numel), dtype, places.device))
        else:
            if slot.padding_rows:
                padding = platform.zeros((slot.padding_rows, *slot.shape[1:]), dtype, places.device)
                gradient = platform.cat([gradient, padding])
            blocks.append(platform.reshape(gradient, (slot.num_ranks, slot.numel)))
    tail.append(_used_here(platform, gradients, dtype, places.device))
    line_end = platform.cat(tail, 1)
    blocks.append(platform.cat([line_end] * places.num_shards))
    return platform.cat(blocks, 1)


def _used_here(platform: Platform, gradients: Sequence[Tensor | None], dtype: DType, device: str) -> Tensor:
    used = [float(gradient is not None) for gradient in gradients]
    if all(used):  # filled on the device: nothing travels from the host in the common case
        return platform.full((1, len(used)), 1.0, dtype, device)
    return platform.tensor([used], dtype, device)
