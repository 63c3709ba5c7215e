"""The trainer's checkpoints: a run as a state of :func:`hp_dtensor.save`, and what ``--resume`` finds out before processes start.

::

    {"run": {"step": 120, "identity": {...}}, "model": {name: DTensor}, "optimizer": {...}, "schedule": {...}}
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hp_dtensor
from hyper_parallel.trainer.errors import UsageError

KEPT = 3
"""Complete checkpoints that stay."""


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says of its run."""

    folder: str
    step: int
    identity: dict[str, Any]


def save(root: Path, *, step: int, identity: dict[str, Any], parts: dict[str, dict[str, Any]]) -> Path:
    """Write a new checkpoint; all ranks call. Returns its folder. Communication: that of :func:`hp_dtensor.save`."""
    return hp_dtensor.save({"run": {"step": step, "identity": identity}, **parts}, root, keep=KEPT)


def find(root: Path, identity: dict[str, Any]) -> Saved:
    """What the newest complete checkpoint says; it may be of another model than ``identity``. Reads no tensor.

    Raises :class:`UsageError` if there is none, it is damaged, or it does not come from this program.
    """
    said: dict[str, Any] = {"run": {"step": 0, "identity": copy.deepcopy(identity)}}
    try:
        report = hp_dtensor.load(said, root, strict=False)
    except (OSError, ValueError) as error:
        raise _refusal(error) from None
    if report.missing or report.mismatched:
        wrong = [f"it lacks {', '.join(report.missing)}"] if report.missing else list(report.mismatched)
        raise UsageError(f"--resume: {report.folder} is no checkpoint of this program: {'; '.join(wrong)}")
    return Saved(report.folder, said["run"]["step"], said["run"]["identity"])


def load(saved: Saved, like: Callable[[str, tuple[int, ...]], Any] | None = None) -> dict[str, Any]:
    """All parts; of tensors that lie as what ``like`` gives each rank reads its own pieces, see :func:`hp_dtensor.load`.

    Raises :class:`UsageError` if a file is damaged. No communication.
    """
    try:
        state: dict[str, Any] = hp_dtensor.load(saved.folder, like=like)
    except (OSError, ValueError) as error:
        raise _refusal(error) from None
    return state


def _refusal(error: Exception) -> UsageError:
    return UsageError(f"--resume: {' '.join(str(error).split())}; or train without --resume")
