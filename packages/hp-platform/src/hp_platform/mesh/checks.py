"""What the arguments of mesh functions may be; each check returns the argument in its one internal form or raises."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Final

DEVICE_TYPES: Final = {"cpu": "cpu", "cuda": "cuda", "npu": "npu", "gpu": "cuda"}
"""Accepted spelling -> device type. ``gpu`` is what MindSpore users write."""

VIRTUAL_DIM: Final = "interleaved_parallel"
"""The reserved name of a last dim that splits the work inside each device; it takes no ranks."""

_LARGEST_RANK: Final = 2**31 - 1


def device_type(given: object) -> str:
    """TypeError unless a str, ValueError unless a known device type without an index."""
    if not isinstance(given, str):
        raise TypeError(f"device_type must be a str such as 'cpu', not {type(given).__name__}")
    if given not in DEVICE_TYPES:
        kind, colon, _ = given.partition(":")
        hint = f"; write {kind!r}, a mesh has no device index" if colon and kind in DEVICE_TYPES else ""
        raise ValueError(f"unknown device_type {given!r}; expected one of {', '.join(DEVICE_TYPES)}{hint}")
    return DEVICE_TYPES[given]


def sizes(given: object, what: str) -> tuple[int, ...]:
    """TypeError unless a tuple of integers, ValueError if it is empty or an entry is not positive."""
    if not isinstance(given, tuple):
        raise TypeError(f"{what} must be a tuple of int such as (2, 4), not {type(given).__name__}")
    if not given:
        raise ValueError(f"{what} is empty; a mesh has at least one dim, give for example (1,)")
    found = tuple(integer(size, f"an entry of {what}") for size in given)
    if min(found) < 1:
        raise ValueError(f"{what} {found} has an entry below 1; sizes are positive")
    return found


def names(given: object, ndim: int, what: str = "mesh_dim_names") -> tuple[str, ...] | None:
    """TypeError unless None or a tuple of str; ValueError for a wrong count, a name that is empty or given twice.

    :data:`VIRTUAL_DIM` may only be the last name (ValueError).
    """
    if given is None:
        return None
    if not isinstance(given, tuple) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"{what} must be a tuple of str such as ('dp', 'tp'), not {given!r}")
    found: tuple[str, ...] = given
    if len(found) != ndim:
        raise ValueError(f"{what} {found} has {len(found)} names for {ndim} dims; give one name per dim")
    if "" in found:
        raise ValueError(f"{what} {found} has an empty name; every dim needs one")
    if len(set(found)) != len(found):
        raise ValueError(f"{what} {found} has a name twice; names tell the dims apart")
    if VIRTUAL_DIM in found[:-1]:
        raise ValueError(f"{what} {found}: {VIRTUAL_DIM!r} is a virtual dim and must be the last one")
    return found


def new_name(given: object, what: str) -> str:
    """The name of a dim made from others: TypeError unless a str, ValueError if empty or reserved."""
    if not isinstance(given, str):
        raise TypeError(f"{what} must be a str, not {type(given).__name__}")
    if not given:
        raise ValueError(f"{what} is empty; give the new dim a name")
    if given == VIRTUAL_DIM:
        raise ValueError(
            f"{what} {given!r} is reserved for the virtual last dim of a mesh; choose another name"
        )
    return given


def slice_names(given: object) -> tuple[str, ...]:
    """The names of a slice: TypeError unless a str or a tuple of str."""
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"a mesh is sliced by a name or a tuple of names, such as mesh['dp', 'tp'], not by {names!r}"
        )
    return names


def integer(given: object, what: str) -> int:
    """TypeError unless an integer (numpy's too); a bool is none."""
    try:
        return operator.index(given if not isinstance(given, bool) else None)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{what} must be an integer, not {given!r}") from None


def ranks(given: Iterable[object], what: str) -> tuple[int, ...]:
    """Global ranks: integers (TypeError), each once, not negative, within int32 (ValueError)."""
    found = tuple(integer(rank, f"a rank of {what}") for rank in given)
    outside = [rank for rank in found if not 0 <= rank <= _LARGEST_RANK]
    if outside:
        raise ValueError(f"{what} has the rank {outside[0]}; ranks run from 0 to {_LARGEST_RANK}")
    if len(set(found)) != len(found):
        twice = sorted({rank for rank in found if found.count(rank) > 1})
        raise ValueError(f"{what} has the ranks {twice} more than once; every rank has one place in a mesh")
    return found


def rank_line(given: Any, what: str) -> tuple[int, ...]:
    """:func:`ranks` of a sequence, or of a vector with ``tolist()``; TypeError for anything else (sets have no order)."""
    found = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(found, (str, bytes)) or not isinstance(found, Sequence):
        raise TypeError(
            f"{what} must be a sequence of int such as [0, 1] or range(2), not {type(given).__name__}"
        )
    return ranks(found, what)


def ranks_of_world(found: tuple[int, ...], world_size: int | None, what: str) -> None:
    """ValueError if a rank is not in the world; nothing is known to be wrong while the world's size is unknown."""
    if world_size is not None and max(found) >= world_size:
        raise ValueError(
            f"{what} has the rank {max(found)}, but the world has only the ranks 0 to {world_size - 1}"
        )


def rank_array(given: Any, virtual_last: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and ranks in row-major order of a nested list or tuple, or of anything with ``tolist()`` and ``shape``.

    With a virtual last dim each rank fills one row of that dim, and is returned once.
    """
    if hasattr(given, "tolist") and hasattr(given, "shape"):  # numpy, torch and MindSpore arrays
        given = given.tolist()
        if not isinstance(given, list):
            raise ValueError(
                f"mesh is the 0-d array {given!r}; a mesh has at least one dim, give for example [{given!r}]"
            )
    if not isinstance(given, (list, tuple)):
        raise TypeError(
            f"mesh must be a nested list or tuple, a numpy array or a tensor of global ranks, not {type(given).__name__}"
        )
    shape = _nested_shape(given)
    if 0 in shape:
        raise ValueError(f"mesh has shape {shape}: it holds no rank; give at least one")
    entries = _nested_entries(given, len(shape))
    if virtual_last:
        width = shape[-1]
        rows = [entries[start : start + width] for start in range(0, len(entries), width)]
        if any(entry != row[0] for row in rows for entry in row):
            raise ValueError(
                f"the last dim {VIRTUAL_DIM!r} is virtual: its {width} slices live on one rank, so each row of mesh must "
                f"repeat one rank, as in [[0, 0], [1, 1]]; got the row {next(r for r in rows if len(set(r)) > 1)}"
            )
        entries = [row[0] for row in rows]
    return shape, ranks(entries, "mesh")


def _nested_shape(given: Sequence[Any]) -> tuple[int, ...]:
    inner = [_nested_shape(entry) if isinstance(entry, (list, tuple)) else () for entry in given]
    if len(set(inner)) > 1:
        raise ValueError(
            f"mesh is ragged: its rows have the shapes {sorted(set(inner))}; give rows of one shape"
        )
    return (len(given), *(inner[0] if inner else ()))


def _nested_entries(given: Sequence[Any], depth: int) -> list[Any]:
    if depth == 1:
        return list(given)
    return [entry for row in given for entry in _nested_entries(row, depth - 1)]


def num_ranks(shape: tuple[int, ...], dim_names: tuple[str, ...] | None) -> int:
    """How many ranks a mesh of this shape has: a virtual last dim takes none."""
    return math.prod(shape[:-1] if is_virtual_last(dim_names) else shape)


def is_virtual_last(dim_names: tuple[str, ...] | None) -> bool:
    """Whether the last dim is the virtual one."""
    return dim_names is not None and dim_names[-1] == VIRTUAL_DIM
