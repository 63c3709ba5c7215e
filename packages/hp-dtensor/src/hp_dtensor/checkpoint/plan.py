"""Who writes which piece, and the index of what is written: pure arithmetic, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from hp_dtensor.checkpoint import safetensors_file
from hp_dtensor.checkpoint.agreement import State
from hp_dtensor.checkpoint.boxes import Box, whole, without_contained
from hp_dtensor.checkpoint.safetensors_file import Entry

FORMAT: Final = "hp-dtensor checkpoint"
VERSION: Final = 1


class Piece(NamedTuple):
    """A part of a tensor, and the rank that writes it."""

    name: str
    box: Box
    key: str
    writer: int


@dataclass(frozen=True)
class Plan:
    """What every rank writes."""

    files: tuple[tuple[Entry, ...], ...]
    """The file of each rank: its entries in order."""
    pieces: tuple[dict[str, Piece], ...]
    """The pieces of each rank, by their keys in its file."""
    index: dict[str, Any]
    """What the index says."""


def file_name(rank: int) -> str:
    """The file of one rank."""
    return f"rank-{rank:05d}.safetensors"


def make_plan(state: State, world_size: int) -> Plan:
    """Deal the pieces: each to that of its holders which has the fewest bytes so far, large pieces first.

    ValueError if the ranks together do not hold a whole tensor.
    """
    pieces = _dealt(state, world_size)
    of_ranks = tuple(
        {piece.key: piece for piece in pieces if piece.writer == rank} for rank in range(world_size)
    )
    files = tuple(
        tuple(
            safetensors_file.in_order(
                Entry(key, state.tensors[piece.name].code, piece.box.size) for key, piece in mine.items()
            )
        )
        for mine in of_ranks
    )
    chunks: dict[str, list[Any]] = {name: [] for name in state.tensors}
    for name, box, key, writer in sorted(pieces, key=lambda piece: (piece.name, piece.box)):
        chunks[name].append(
            {"file": file_name(writer), "key": key, "offset": list(box.offset), "size": list(box.size)}
        )
    tensors = {
        name: {"dtype": tensor.code, "shape": list(tensor.shape), "chunks": chunks[name]}
        for name, tensor in state.tensors.items()
    }
    index = {
        "format": FORMAT,
        "version": VERSION,
        "files": {file_name(rank): safetensors_file.size_of(entries) for rank, entries in enumerate(files)},
        "root": state.root,
        "kinds": state.kinds,
        "entries": {
            name: tensors[name] if name in tensors else {"value": state.values[name]} for name in state.order
        },
    }
    return Plan(files, of_ranks, index)


def _dealt(state: State, world_size: int) -> list[Piece]:
    wanted: list[tuple[int, str, Box, bool]] = []
    for name, tensor in state.tensors.items():
        boxes = [box for box in without_contained(list(tensor.holders)) if box.volume]
        everything = whole(tensor.shape)
        if sum(box.volume for box in boxes) < everything.volume:
            held = ", ".join(f"{list(box.offset)} + {list(box.size)}" for box in boxes) or "nothing"
            raise ValueError(
                f"the ranks together do not hold the whole of {name} {list(tensor.shape)}, only {held}"
            )
        width = safetensors_file.WIDTH_OF[tensor.code]
        wanted.extend((width * box.volume, name, box, box == everything) for box in boxes)
    load = [0] * world_size
    dealt = []
    for nbytes, name, box, is_whole in sorted(wanted, key=lambda piece: (-piece[0], piece[1], piece[2])):
        writer = min(state.tensors[name].holders[box], key=lambda rank: (load[rank], rank))
        load[writer] = load[writer] + nbytes
        dealt.append(Piece(name, box, name if is_whole else _key(name, box), writer))
    return dealt


def _key(name: str, box: Box) -> str:
    """``w~[0:3,0:4]``. No name holds ``~[``, so it is nobody else's."""
    ranges = (f"{start}:{start + size}" for start, size in zip(box.offset, box.size, strict=True))
    return f"{name}~[{','.join(ranges)}]"
