"""Sharded checkpoints of the trainer: one file per process, written beside the newest and put in its place at the end.

::

    out/checkpoints/step-000120/shard-00000-of-00004.safetensors   local parts of parameters and optimizer state
                                ...
                                index.json                          global shapes, step, identity; written last
    out/checkpoints/newest                                          name of the folder; renamed into place after all else

A save that is killed leaves a folder ``*.partial`` that nobody reads, and ``newest`` as it was. Parts are chunks of dim 0 by
the one chunk rule, so another number of processes reads its own rows out of the parts of the earlier one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_dtensor.chunk import chunk_offset, chunk_size
from hyper_parallel.trainer.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

POINTER = "newest"
INDEX = "index.json"
REPLACED = ".replaced"


@dataclass(frozen=True)
class Saved:
    """What ``index.json`` says."""

    folder: Path
    step: int
    nproc: int
    identity: dict[str, Any]
    shapes: dict[str, list[int]]
    """Parameter name -> global shape."""


def save(
    root: Path,
    *,
    step: int,
    rank: int,
    nproc: int,
    parts: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    identity: dict[str, Any],
    barrier: Any,
) -> Path:
    """Write this rank's parts; all ranks call. Returns the folder. Communication: three barriers (``barrier()``)."""
    from safetensors.numpy import save_file

    final = root / f"step-{step:06d}"
    partial = root / f"{final.name}.partial"
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed here
        partial.mkdir(parents=True)
    barrier()
    file = partial / _part_name(rank, nproc)
    save_file(dict(parts), file)
    _flush(file)
    barrier()
    if rank == 0:
        index = {
            "step": step,
            "nproc": nproc,
            "identity": identity,
            "shapes": {n: list(s) for n, s in shapes.items()},
        }
        (partial / INDEX).write_text(json.dumps(index, indent=1) + "\n")
        _flush(partial / INDEX)
        replaced = root / f"{final.name}{REPLACED}"
        if final.exists():
            # An earlier run's. Put aside whole, and found there by find() should this be the end of the process.
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        partial.rename(final)
        pointer = root / f"{POINTER}.partial"
        pointer.write_text(final.name + "\n")
        _flush(pointer)
        pointer.replace(root / POINTER)
        _flush(root)
        shutil.rmtree(replaced, ignore_errors=True)
    barrier()
    return final


def find(root: Path) -> Saved:
    """The newest complete checkpoint. Raises :class:`UsageError` if there is none, or it is damaged."""
    from safetensors import SafetensorError

    pointer = root / POINTER
    where = pointer
    try:
        if not pointer.exists():
            raise UsageError(
                f"--resume: there is no checkpoint in {root}; train without --resume first, or give another --out"
            )
        where = root / (pointer.read_text().strip() or "(no name)")
        aside = where.with_name(where.name + REPLACED)
        if (
            not where.exists() and aside.exists()
        ):  # a save of the same step was killed between its two renames
            where = aside
        saved = _read_index(where)
        for part in range(saved.nproc):
            where = saved.folder / _part_name(part, saved.nproc)
            if not where.exists():
                raise UsageError(f"--resume: {saved.folder} lacks {where.name}: the checkpoint is incomplete")
            _check_part(saved, part)
    except UsageError:
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(
            f"--resume: {where} is damaged ({reason}); write the name of an earlier step's folder into {pointer}, "
            "or train without --resume"
        ) from None
    return saved


def _read_index(folder: Path) -> Saved:
    index = json.loads((folder / INDEX).read_text())
    saved = Saved(folder, index["step"], index["nproc"], dict(index["identity"]), dict(index["shapes"]))
    if not (type(saved.step) is int and type(saved.nproc) is int and saved.step >= 0 and saved.nproc >= 1):
        raise ValueError(f"step {saved.step!r} of {saved.nproc!r} processes")
    return saved


def _check_part(saved: Saved, part: int) -> None:
    """Header and length of a part, and that it holds its rows of every parameter. Reads no tensor."""
    from safetensors import safe_open

    with safe_open(saved.folder / _part_name(part, saved.nproc), framework="numpy") as file:
        found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 -- not a dictionary
    if missing := saved.shapes.keys() - {key.rpartition("/")[2] for key in found}:
        raise ValueError(f"{min(missing)} is missing")
    for key, shape in found.items():
        rows, *rest = saved.shapes[key.rpartition("/")[2]]
        expected = (chunk_size(rows, saved.nproc, part), *rest)
        if shape != expected:
            raise ValueError(f"{key} is of shape {shape}, expected {expected}")


def load_rows(saved: Saved, key: str, shape: tuple[int, ...], rank: int, nproc: int) -> np.ndarray:
    """The rows of tensor ``key`` (global ``shape``) that ``rank`` of ``nproc`` holds, read from the parts that have them."""
    import numpy as np
    from safetensors import safe_open

    wanted_start, wanted_size = chunk_offset(shape[0], nproc, rank), chunk_size(shape[0], nproc, rank)
    pieces = []
    for part in range(saved.nproc):
        start, size = chunk_offset(shape[0], saved.nproc, part), chunk_size(shape[0], saved.nproc, part)
        low, high = max(start, wanted_start), min(start + size, wanted_start + wanted_size)
        if low >= high and part > 0:
            continue
        with safe_open(saved.folder / _part_name(part, saved.nproc), framework="numpy") as file:
            if low < high:
                pieces.append(file.get_slice(key)[low - start : high - start])
            else:  # for the dtype, where this rank holds no rows
                pieces.append(file.get_tensor(key)[:0])
    return np.concatenate(pieces)


def _part_name(rank: int, nproc: int) -> str:
    return f"shard-{rank:05d}-of-{nproc:05d}.safetensors"


def _flush(file: Path) -> None:
    """Bytes on the disk before the rename that makes them count."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
