"""``load``: every rank reads what it holds, and nothing else; any layout, mesh and number of ranks from any other."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, overload

from hp_dtensor.checkpoint import folders, nest, sources
from hp_dtensor.checkpoint.boxes import Box, whole
from hp_dtensor.checkpoint.nest import FlatState, flatten
from hp_dtensor.checkpoint.report import LoadReport
from hp_dtensor.checkpoint.safetensors_file import NAME_OF, WIDTH_OF
from hp_dtensor.checkpoint.saving import wait_for_running
from hp_dtensor.checkpoint.sources import Source
from hp_dtensor.checkpoint.stored import Chunk, Stored, StoredTensor
from hp_dtensor.dtensor import DTensorMethods
from hp_platform import get_platform

Like = Callable[[str, tuple[int, ...]], Any]
"""From a tensor's name and shape to the DTensor that it shall lie as, or None."""


@overload
def load(state: str | os.PathLike[str], path: None = None, *, like: Like | None = None) -> Any: ...
@overload
def load(
    state: Any, path: str | os.PathLike[str], *, strict: bool = True, cast: bool = False
) -> LoadReport: ...
def load(
    state: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    strict: bool = True,
    cast: bool = False,
    like: Like | None = None,
) -> Any:
    """Read a checkpoint into a state, in place; or, as ``load(path)``, as a new nested state of whole plain tensors on cpu.

    Args:
        state: nested as it was saved, with DTensors (any placements, mesh, number of ranks) or plain tensors, which are
            filled, and values, which are replaced in their dicts and lists.
        path: the folder given to ``save`` (the newest complete checkpoint is read), or the folder of one save. Each rank looks for
            the newest by itself: while another job saves there, give all ranks the folder of one save.
        strict: whether names that are missing or unexpected, and shapes, dtypes and kinds that differ, are an error, told
            before anything is changed. False: what fits is loaded, and the report tells the rest.
        cast: whether a dtype that differs is converted instead.
        like: of ``load(path)``: ``like(name, shape)`` gives a DTensor of this shape, as which the tensor shall lie, with pieces
            on the device of its piece; or None for a whole one on cpu. Each rank reads its own pieces then.

    Returns a :class:`hp_dtensor.LoadReport`; ``load(path)`` the state. Reads only the parts of files that overlap what this
    rank holds; one tensor's local piece at a time is in host memory. Nothing is unpickled. Communication: none: ranks that do
    not hold the state need not call.

    Raises ValueError if nothing complete is there, a file is damaged, or ``strict`` finds differences.
    """
    wait_for_running()
    if path is None:
        if not isinstance(state, (str, os.PathLike)):
            raise ValueError(
                f"load takes load(path), or load(state, path); got a {type(state).__name__} and no path: say where it lies"
            )
        return _whole(_open(Path(state)), like)
    if like is not None:
        raise ValueError(
            "load(state, path) fills the tensors that the state has: leave like out, or leave the state out"
        )
    return fill(flatten(state, sources.is_tensor), _open(Path(path)), strict=strict, cast=cast)


def _open(path: Path) -> Stored:
    folder = folders.find(path)
    index = folders.read_index(folder)
    try:
        return _described(folder, index)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder / folders.INDEX} lacks a part ({type(error).__name__}: {error}): the checkpoint is damaged; load another "
            f"one"
        ) from error


def _described(folder: Path, index: dict[str, Any]) -> Stored:
    """What the index says."""
    tensors, values = {}, {}
    for name, entry in index["entries"].items():
        if "value" in entry:
            values[name] = entry["value"]
            continue
        chunks = tuple(
            Chunk(c["file"], c["key"], Box(tuple(c["offset"]), tuple(c["size"]))) for c in entry["chunks"]
        )
        tensors[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), chunks)
    return Stored(
        folder,
        tensors,
        values,
        order=tuple(index["entries"]),
        kinds=index["kinds"],
        root=index["root"],
        sizes=index["files"],
        incomplete=folders.incomplete(folder.parent),
    )


def _whole(stored: Stored, like: Like | None) -> Any:
    leaves = {
        name: stored.values[name] if name in stored.values else _new_tensor(name, stored, like)
        for name in stored.order
    }
    return nest.rebuild(stored.root, stored.kinds, leaves)


def _new_tensor(name: str, stored: Stored, like: Like | None) -> Any:
    shape = stored.tensors[name].shape
    model = None if like is None else like(name, shape)
    if model is None:
        return stored.tensor(name, stored.bits(name, whole(shape)), "cpu")
    if not isinstance(model, DTensorMethods) or tuple(model.shape) != shape:
        raise ValueError(f"like({name!r}, {shape}) must give a DTensor of this shape or None, got {model!r}")
    target = sources.source_of(name, model)
    local = stored.tensor(name, _bits(name, target, stored), get_platform().device_of(target.local))
    return model._wrap(local, model._spec)


def fill(flat: FlatState, stored: Stored, *, strict: bool, cast: bool) -> LoadReport:
    """Compare, then read what fits."""
    targets = sources.sources_of(flat)
    missing = [name for name in flat.leaves if name not in stored.tensors and name not in stored.values]
    unexpected = [name for name in (*stored.tensors, *stored.values) if name not in flat.leaves]
    differences = {
        name: told
        for name in flat.leaves
        if name not in missing and (told := _difference(name, flat, targets.get(name), stored, cast=cast))
    }
    report = LoadReport(
        str(stored.folder), tuple(missing), tuple(unexpected), tuple(differences.values()), stored.incomplete
    )
    if strict and not report.is_exact:
        raise ValueError(
            f"the state and the checkpoint do not fit, and nothing was changed. {report}. Make the state as it was saved, or "
            f"load with strict=False, which leaves these out and returns the report"
        )
    for name, leaf in flat.leaves.items():
        if name in missing or name in differences:
            continue
        if name in targets:
            _fill_tensor(name, targets[name], stored)
        elif not _equal(leaf.value, stored.values[name]):
            leaf.holder[leaf.key] = stored.values[name]
    return report


def _difference(name: str, flat: FlatState, target: Source | None, stored: Stored, *, cast: bool) -> str:
    """Why a name that both have cannot be loaded; empty if it can."""
    if target is None:
        if name in stored.tensors:
            return f"{name} (a tensor is stored, the state has a value)"
        leaf = flat.leaves[name]
        if isinstance(leaf.holder, tuple) and not _equal(leaf.value, stored.values[name]):
            return f"{name} ({stored.values[name]!r} is stored, and a tuple cannot take it in place of {leaf.value!r})"
        return ""
    if name in stored.values:
        return f"{name} (a value is stored, the state has a tensor)"
    found = stored.tensors[name]
    if found.shape != target.shape:
        return f"{name} (shape {list(found.shape)} is stored, the state has {list(target.shape)})"
    if found.code != target.code and not cast:
        return f"{name} (dtype {NAME_OF[found.code]} is stored, the state has {NAME_OF[target.code]}; cast=True converts)"
    return ""


def _fill_tensor(name: str, target: Source, stored: Stored) -> None:
    if 0 in target.local.shape:
        return
    platform = get_platform()
    bits = _bits(name, target, stored)
    platform.copy_(target.local, stored.tensor(name, bits, platform.device_of(target.local)))


def _bits(name: str, target: Source, stored: Stored) -> Any:
    """The bits of this rank's piece."""
    import numpy as np

    pieces = [stored.bits(name, part.box) for part in target.parts]
    if not target.is_run:
        return pieces[0]
    nothing = np.empty(0, f"u{WIDTH_OF[stored.tensors[name].code]}")
    return np.concatenate([nothing, *(piece.reshape(-1) for piece in pieces)])


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and repr(a) == repr(b)
