"""What this rank holds of a state's tensors: local tensors and the boxes that they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hp_dtensor.checkpoint.boxes import Box, boxes_of_run, whole
from hp_dtensor.checkpoint.nest import FlatState
from hp_dtensor.checkpoint.safetensors_file import code_of
from hp_dtensor.dtensor import DTensorMethods
from hp_dtensor.spec import Spec, local_block, shown
from hp_platform import get_platform

PIECE_BYTES: Final = 32 * 1024 * 1024
"""So much of a tensor is copied to the host at a time."""


@dataclass(frozen=True)
class Part:
    """A box of a tensor that this rank holds."""

    box: Box
    local: Any
    """Its values, of the box's size: the local tensor or a view into it."""


@dataclass(frozen=True)
class Source:
    """A tensor of a state, as this rank has it."""

    code: str
    """The file format's name of the dtype."""
    shape: tuple[int, ...]
    """Global."""
    parts: tuple[Part, ...]
    """What this rank holds, in the order of the local tensor. One box, but of a run of elements (RaggedShard) several."""
    local: Any
    spec: Spec | None
    """None: a plain tensor, the same on all ranks."""

    @property
    def is_run(self) -> bool:
        """Whether the local tensor is a run of elements in flat order instead of a box."""
        return self.spec is not None and len(self.spec.local_shape) != len(self.shape)


def is_tensor(x: Any) -> bool:
    """Whether it is a DTensor or a plain tensor of the framework in use."""
    return isinstance(x, DTensorMethods) or get_platform().is_tensor(x)


def sources_of(flat: FlatState) -> dict[str, Source]:
    """The tensors of a state by name. ValueError for what no file can hold: sums that are not reduced, and meta tensors."""
    return {name: source_of(name, leaf.value) for name, leaf in flat.leaves.items() if leaf.is_tensor}


def source_of(name: str, x: Any) -> Source:
    """One tensor of a state."""
    platform = get_platform()
    spec = x._spec if isinstance(x, DTensorMethods) else None
    local = x if spec is None else x._local
    if spec is not None and any(placement.is_partial() for placement in spec.placements):
        raise ValueError(
            f"{name} has placements {shown(spec.placements)}: its values are summands on several ranks; redistribute() it to "
            f"Shard or Replicate first"
        )
    if platform.device_of(local) == "meta":
        raise ValueError(
            f"{name} is on the meta device and has no memory: make it on a real device first, for example with empty"
        )
    try:
        code = code_of(platform.dtype_name(local.dtype), name)
    except KeyError:  # one that the platform has no name for, such as a quantized one
        code = code_of(str(local.dtype), name)
    if spec is None:
        shape = tuple(local.shape)
        return Source(code, shape, (Part(whole(shape), local),), local, None)
    if len(spec.local_shape) == len(spec.shape):
        return Source(code, spec.shape, (Part(Box(spec.local_offset, spec.local_shape), local),), local, spec)
    return Source(code, spec.shape, tuple(_parts_of_run(spec, local)), local, spec)


def _parts_of_run(spec: Spec, local: Any) -> Iterator[Part]:
    platform = get_platform()
    start, length = spec.local_offset[0], spec.local_shape[0]
    at = 0
    with platform.no_grad():
        run = platform.detach(local)
        for box in boxes_of_run(spec.shape, start, start + length):
            yield Part(box, platform.reshape(platform.narrow(run, 0, at, box.volume), box.size))
            at = at + box.volume


def boxes_of_ranks(spec: Spec) -> dict[Box, list[int]]:
    """Every rank's box of a tensor that lies in boxes: box -> the global ranks that hold it. Arithmetic only."""
    found: dict[Box, list[int]] = {}
    ranks = spec.mesh.mesh
    for coordinate in itertools.product(*(range(size) for size in spec.mesh.shape)):
        size, offset = local_block(spec.shape, spec.placements, spec.mesh.shape, coordinate)
        holders = found.setdefault(Box(offset, size), [])
        rank = int(ranks[coordinate])
        if rank not in holders:
            holders.append(rank)
    return found


def placed(source: Source) -> list[Any]:
    """How a tensor lies, for comparing ranks."""
    if source.spec is None:
        return [source.code, source.shape]
    mesh = source.spec.mesh
    return [source.code, source.shape, shown(source.spec.placements), mesh.shape, mesh.rank_list]


def streamed(local: Any) -> Iterator[Any]:
    """The bits of a tensor in row-major order, copied to the host by parts of at most :data:`PIECE_BYTES`."""
    platform = get_platform()
    width = platform.itemsize(local.dtype)
    if 0 in local.shape:
        return
    with platform.no_grad():
        x = platform.detach(local)
        row = platform.reshape(x, (-1,))
        step = max(1, PIECE_BYTES // width)
        for start in range(0, row.shape[0], step):
            yield platform.to_bits(platform.narrow(row, 0, start, min(step, row.shape[0] - start)))


def staged(parts: Mapping[str, Part]) -> dict[str, Any]:
    """A copy of each part's bits on the host."""
    platform = get_platform()
    return {key: platform.to_bits(platform.detach(part.local)) for key, part in parts.items()}
