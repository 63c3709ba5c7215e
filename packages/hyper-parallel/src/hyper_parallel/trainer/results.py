"""The folder of a run: which one it is, what another run has left there, and how that goes."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Final

DEFAULT: Final = "out/train"
CHECKPOINTS: Final = "checkpoints"
METRICS: Final = "metrics.jsonl"
PICTURE: Final = "loss.png"
MODEL: Final = "model.safetensors"
FILES: Final = (METRICS, PICTURE, MODEL)
ONE_PROCESS: Final = "one-process"
"""Folder of the run that ``--verify`` compares with."""


def default_folder(*, resume: bool, overwrite: bool) -> str:
    """Where a run without ``--out`` goes: out/train, or out/train-2 and so on, the first without a run; with ``resume`` the last one with a
    run. Told by files that a run writes when all its processes are at work, so those that torchrun starts choose alike.
    """
    folders = (DEFAULT if number == 1 else f"{DEFAULT}-{number}" for number in itertools.count(1))
    taken = list(itertools.takewhile(lambda folder: holds_run(Path(folder)), folders))
    if overwrite or not taken:
        return DEFAULT
    return taken[-1] if resume else f"{DEFAULT}-{len(taken) + 1}"


def holds_run(out: Path) -> bool:
    """Whether a run has left files there."""
    checkpoints = out / CHECKPOINTS
    return any((out / name).exists() for name in FILES) or (
        checkpoints.is_dir() and next(checkpoints.iterdir(), None) is not None
    )


def clear(out: Path) -> None:
    """Remove what a run has left: its checkpoints first, and nothing that is not a run's. The folders themselves stay."""
    checkpoints = out / CHECKPOINTS
    for entry in (*(checkpoints.iterdir() if checkpoints.is_dir() else ()), out / ONE_PROCESS):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    for name in FILES:
        (out / name).unlink(missing_ok=True)
