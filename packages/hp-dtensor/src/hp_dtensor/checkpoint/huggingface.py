"""Folders as Hugging Face's tools write and read them: whole tensors in ``model*.safetensors``, and an index if there are several."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hp_dtensor.checkpoint import agreement, folders, loading, rendezvous, safetensors_file, sources
from hp_dtensor.checkpoint.agreement import FAILED
from hp_dtensor.checkpoint.boxes import whole
from hp_dtensor.checkpoint.growing_file import GrowingFile, NoFile
from hp_dtensor.checkpoint.nest import FlatState, Leaf
from hp_dtensor.checkpoint.report import LoadReport
from hp_dtensor.checkpoint.safetensors_file import Entry, TensorFile
from hp_dtensor.checkpoint.saving import DEFAULT_TIMEOUT, check_options, refuse_failed, wait_for_running
from hp_dtensor.checkpoint.sources import Source
from hp_dtensor.checkpoint.stored import Chunk, Stored, StoredTensor

MODEL: Final = "model.safetensors"
MODEL_INDEX: Final = "model.safetensors.index.json"
METADATA: Final = {"format": "pt"}
"""Hugging Face's loaders refuse files without it; names and layout are the same under every framework."""


# -------------------------------------------------------------------------------------------------------------------- in
def load_safetensors(
    state: Mapping[str, Any], folder: str | os.PathLike[str], *, strict: bool = True, cast: bool = False
) -> LoadReport:
    """Fill a flat state (name -> DTensor or plain tensor), in place, from a Hugging Face folder or one safetensors file.

    Each rank reads only the parts of the files that overlap what it holds. ``strict``, ``cast``, the report and the errors are
    those of :func:`hp_dtensor.load`; ``strict=False, cast=True`` fits weights that were published in another dtype or with
    other names beside. Communication: none.
    """
    wait_for_running()
    return loading.fill(_flat(state, "load_safetensors"), _stored(Path(folder)), strict=strict, cast=cast)


def _stored(path: Path) -> Stored:
    """What the files say of themselves."""
    if path.is_file():
        folder, files = path.parent, [path.name]
    else:
        folder, files = path, _files_of(path)
    opened = {name: _opened(folder, name) for name in files}
    tensors = {
        entry.key: StoredTensor(entry.code, entry.shape, (Chunk(name, entry.key, whole(entry.shape)),))
        for name, file in opened.items()
        for entry in file.entries.values()
    }
    return Stored(folder, tensors, _open=opened)


def _opened(folder: Path, name: str) -> TensorFile:
    path = folder / name
    if not path.exists():
        raise ValueError(
            f"{folder} lacks {name}, which its {MODEL_INDEX} names: the download or export is not complete"
        )
    return TensorFile(path)


def _files_of(folder: Path) -> list[str]:
    index = folder / MODEL_INDEX
    if index.exists():
        try:
            return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{index} cannot be read ({type(error).__name__}: {error}): the folder is damaged"
            ) from error
    if (folder / MODEL).exists():
        return [MODEL]
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    raise ValueError(
        f"{folder} has neither {MODEL_INDEX} nor {MODEL}, and {len(found)} other safetensors files; give a folder in Hugging "
        f"Face's layout, or the path of one file"
    )


# ------------------------------------------------------------------------------------------------------------------- out
def save_safetensors(
    state: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
    timeout: float = DEFAULT_TIMEOUT,
) -> Path:
    """Write a flat state (name -> DTensor or plain tensor) as whole tensors in Hugging Face's layout; returns the folder.

    Args:
        state: the same names, shapes and dtypes on all ranks, which all call. Plain tensors are equal on all ranks.
        folder: a new one, or one without a model, on a file system that all ranks share.
        max_shard_bytes: how many bytes of tensors a file holds at most; a larger tensor has a file of its own. All in one file:
            ``model.safetensors``; else ``model-00001-of-00003.safetensors`` and so on, and ``model.safetensors.index.json``.
        timeout: seconds to wait for the other ranks' files.

    Files are dealt to the ranks, which write them side by side; a rank holds two whole tensors at most besides its state.
    Communication: one all-gather of 16 bytes a rank, and per DTensor what its ``full_tensor()`` costs. ValueError for a nested
    or empty state, states that differ between ranks, or a folder that has a model.
    """
    wait_for_running()
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is a positive number of bytes, got {max_shard_bytes!r}")
    check_options(None, timeout)
    target, digest = Path(folder), 0
    problem: Exception | None = None
    found: dict[str, Source] = {}
    try:
        flat = _flat(state, "save_safetensors")
        found = sources.sources_of(flat)
        digest = agreement.digest_of_shapes(found)
        _check_target(target)
    except (ValueError, OSError) as error:
        problem = error
    rank, world_size = agreement.join(found)
    told = agreement.tell(FAILED if problem is not None else 0, digest, world_size)
    if problem is not None:
        raise problem
    refuse_failed(told, f"save_safetensors to {target}")
    if any(theirs != told[0][1] for _, theirs in told):
        differ = [str(r) for r, (_, theirs) in enumerate(told) if theirs != told[0][1]]
        raise ValueError(
            f"save_safetensors to {target}: rank {', '.join(differ)} has other names, shapes or dtypes than rank 0; give the "
            f"whole model on all ranks, or use save, where they may differ"
        )
    files = _cut(found, max_shard_bytes)
    with rendezvous.telling(target, rank):
        _write_files(target, files, found, rank, world_size)
        wanted = [target / name for name in files]
        rendezvous.wait_until(lambda: [str(f) for f in wanted if not f.exists()], target, timeout)
        if len(files) > 1 and rank == 0:
            folders.put_text(target / MODEL_INDEX, _index(files))
    last = target / (MODEL_INDEX if len(files) > 1 else MODEL)
    rendezvous.wait_until(lambda: [] if last.exists() else [str(last)], target, timeout)
    return target


def _cut(found: Mapping[str, Source], max_shard_bytes: int) -> dict[str, list[Entry]]:
    """Which tensors each file holds: as they come, a new file where one would grow too large."""
    groups: list[list[Entry]] = []
    room = 0
    for name, source in found.items():
        entry = Entry(name, source.code, source.shape)
        if not groups or entry.nbytes > room:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(entry)
        room = room - entry.nbytes
    if len(groups) == 1:
        return {MODEL: safetensors_file.in_order(groups[0])}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": safetensors_file.in_order(group)
        for number, group in enumerate(groups, start=1)
    }


def _write_files(
    target: Path, files: Mapping[str, list[Entry]], found: Mapping[str, Source], rank: int, world_size: int
) -> None:
    """All ranks gather all tensors, in one order; each keeps those of its files.

    The files are written by a thread each, one tensor behind, so that ranks gather on while others' disks work. Tensors come
    in turn from the files of different ranks. A rank that cannot write gathers on, since the others wait for its pieces, and
    says so at the end.
    """
    names, errors = list(files), []
    for turn in range(0, len(names), world_size):
        together = names[turn : turn + world_size]
        own = together[rank] if rank < len(together) else None
        with GrowingFile(target / own, files[own], METADATA) if own is not None else NoFile() as stream:
            for position in range(max(len(files[name]) for name in together)):
                for name in together:
                    if position < len(files[name]):
                        full = _full(found[files[name][position].key])
                        if name == own:
                            stream.add(full)
        if stream.error is not None:
            errors.append(stream.error)
    if errors:
        raise errors[0]


def _full(source: Source) -> Any:
    if source.spec is None:
        return source.local
    from hp_dtensor.native import DTensor
    from hp_platform import get_platform

    with get_platform().no_grad():
        return DTensor._wrap(get_platform().detach(source.local), source.spec).full_tensor()


def _index(files: Mapping[str, list[Entry]]) -> str:
    weight_map = {entry.key: name for name, entries in files.items() for entry in entries}
    total = sum(entry.nbytes for entries in files.values() for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2) + "\n"


# ---------------------------------------------------------------------------------------------------------------- checks
def _flat(state: Any, function: str) -> FlatState:
    if not isinstance(state, Mapping) or not state:
        raise ValueError(
            f"{function} takes a dict of names and tensors with at least one entry, got {'an empty' if not state else 'a'} "
            f"{type(state).__name__}"
        )
    flat = FlatState("dict")
    for name, value in state.items():
        if not isinstance(name, str) or name == safetensors_file.METADATA or not sources.is_tensor(value):
            raise ValueError(
                f"{function} takes names and tensors only, got {name!r}: {type(value).__name__}; save and load keep nested "
                f"states and values"
            )
        flat.leaves[name] = Leaf(value, state, name, True)
    return flat


def _check_target(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    if found := sorted(_models(target)):
        raise ValueError(
            f"{target} has {', '.join(found[:3])} already, which loaders would mix with the new files; give another folder"
        )


def _models(target: Path) -> Iterator[str]:
    for entry in target.iterdir():
        if ".safetensors" in entry.name or entry.name.endswith(".failed"):
            yield entry.name
