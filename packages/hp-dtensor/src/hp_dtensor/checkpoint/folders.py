"""Folders of checkpoints: one per save, complete when its index stands, and a pointer to the newest.

::

    root/000001/rank-00000.safetensors   pieces that rank 0 wrote
         000001/rank-00001.safetensors   ...
         000001/index.json               what lies where; put in place when all files are on the disk
         latest                          "000001"; put in place after all else

Nothing that stands is ever written again: files appear under their names by a rename. So whatever moment a save ends at,
``latest`` names a folder that is whole, and a folder without ``index.json`` is one that was never finished.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from hp_dtensor.checkpoint.plan import FORMAT, VERSION

POINTER: Final = "latest"
INDEX: Final = "index.json"
UNFINISHED: Final = ".part"
REMOVED: Final = ".removed"
"""End of the name of a folder that is about to go."""
_BUSY: Final = frozenset({errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST})
"""What another job does at the same moment: it removes the same folder, or a file that it had begun appears there."""
_NUMBERED: Final = re.compile(r"\d{6,}")


def make_new(root: Path) -> int:
    """The number of a new folder, above all that are there, also unfinished ones; the folder is made."""
    root.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(folder.name) for folder in _numbered(root)), default=0)
    folder_of(root, number).mkdir()
    return number


def folder_of(root: Path, number: int) -> Path:
    """The folder of one save."""
    return root / f"{number:06d}"


def put(path: Path, write: Callable[[Path], None]) -> None:
    """A file appears under its name when ``write`` has written all of it to the disk under another one."""
    part = path.with_name(path.name + UNFINISHED)
    write(part)
    os.replace(part, path)


def put_text(path: Path, text: str) -> None:
    """The same for a short text; the renaming is on the disk, too."""

    def write(part: Path) -> None:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    put(path, write)
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Names that have appeared in the folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(folder: Path, index: dict[str, Any]) -> None:
    """All files are there: make the folder complete, and the newest."""
    flush_folder(folder)
    put_text(folder / INDEX, _shown(index))
    if not is_pointed(folder):  # another job may have saved to a later one
        put_text(folder.parent / POINTER, folder.name + "\n")


def _shown(index: dict[str, Any]) -> str:
    """JSON with one entry a line."""
    entries = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in index["entries"].items()
    )
    rest = {key: value for key, value in index.items() if key != "entries"}
    return f'{json.dumps(rest, indent=1)[:-2]},\n "entries": {{\n{entries}\n }}\n}}\n'


def pointed(root: Path) -> str | None:
    """What the pointer says; None if there is none."""
    try:
        return (root / POINTER).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None


def is_pointed(folder: Path) -> bool:
    """Whether the pointer says this folder, or a later one, which another job may have saved to meanwhile."""
    name = pointed(folder.parent) or ""
    return _NUMBERED.fullmatch(name) is not None and int(name) >= int(folder.name)


def is_complete(folder: Path) -> bool:
    """Whether a save into this folder was finished."""
    return (folder / INDEX).exists()


def incomplete(root: Path) -> tuple[str, ...]:
    """Names of folders whose save was never finished (or is under way)."""
    return tuple(folder.name for folder in _numbered(root) if not is_complete(folder))


def remove_old(own: Path, keep: int) -> None:
    """All but the newest ``keep`` complete folders beside ``own``, and unfinished ones older than that, which stays in any case.

    A folder is renamed before it is emptied, so that it is never half a checkpoint, and another job that still writes into it finds it gone
    and can put nothing more there. What cannot be emptied now goes the next time.
    """
    for left in own.parent.glob(f"*{REMOVED}"):
        _empty(left)
    numbered = _numbered(own.parent)
    kept = [own, *[folder for folder in numbered if is_complete(folder)][-keep:]]
    for folder in numbered:
        if folder not in kept and int(folder.name) < int(own.name):
            gone = folder.with_name(folder.name + REMOVED)
            try:
                folder.rename(gone)
            except OSError as error:
                if error.errno not in _BUSY:
                    raise
            else:
                _empty(gone)


def _empty(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        if error.errno not in _BUSY:
            raise


def find(path: Path) -> Path:
    """The complete folder that ``path`` means: itself, or the newest below it. ValueError that says what there is instead."""
    if is_complete(path):
        return path
    name = pointed(path)
    if name is not None:
        if name and is_complete(path / name):
            return path / name
        raise ValueError(f"{path / POINTER} names {name!r}, which is no complete checkpoint; {_there(path)}")
    if _NUMBERED.fullmatch(path.name) and path.is_dir():
        raise ValueError(
            f"{path} is incomplete: it has no {INDEX}, so its save was killed or is under way; {_there(path.parent)}"
        )
    raise ValueError(f"there is no checkpoint in {path} (no {POINTER}, no {INDEX}); {_there(path)}")


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a complete folder. ValueError if it is damaged or of a later version."""
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read ({error}): the checkpoint is damaged; load another one"
        ) from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not the index of a {FORMAT}; for folders of other tools see load_safetensors"
        )
    if index["version"] != VERSION:
        raise ValueError(
            f"{path} is of version {index['version']}, and this hp-dtensor reads version {VERSION}: install a later one"
        )
    return index


def _numbered(root: Path) -> list[Path]:
    """Folders of saves, oldest first."""
    found = [entry for entry in root.iterdir() if _NUMBERED.fullmatch(entry.name) and entry.is_dir()]
    return sorted(found, key=lambda folder: int(folder.name))


def _there(root: Path) -> str:
    if not root.is_dir():
        return f"{root} is no folder: check the path"
    complete = [folder.name for folder in _numbered(root) if is_complete(folder)]
    unfinished = incomplete(root)
    return (
        f"complete there: {', '.join(complete) or 'none'}; incomplete: {', '.join(unfinished) or 'none'}"
        + (f"; load {root / complete[-1]}" if complete else "")
    )
