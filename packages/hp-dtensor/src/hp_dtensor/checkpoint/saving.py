"""``save``: every rank streams its pieces into a file of its own; the first rank makes them a checkpoint when all are there."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_dtensor.checkpoint import agreement, folders, rendezvous, safetensors_file, sources
from hp_dtensor.checkpoint.agreement import FAILED
from hp_dtensor.checkpoint.nest import flatten
from hp_dtensor.checkpoint.plan import Plan, file_name, make_plan
from hp_dtensor.checkpoint.sources import Part, Source
from hp_platform import _process

DEFAULT_TIMEOUT = 1800.0


def save(
    state: Any, path: str | os.PathLike[str], *, keep: int | None = None, timeout: float = DEFAULT_TIMEOUT
) -> Path:
    """Write a state to a new folder below ``path``; returns the folder. All ranks call.

    Args:
        state: nested dicts, lists and tuples with DTensors, plain tensors, bool, int, float, str and None. Ranks may have
            different names (stages of a pipeline); what has the same name on several ranks must be the same. Plain tensors are
            taken to be equal on all ranks that have them, and one rank's is written, unseen.
        path: a folder on a file system that all ranks share; made if need be.
        keep: how many complete checkpoints stay, this one among them; older and unfinished ones are removed. None: all.
        timeout: seconds to wait for the other ranks' files.

    Each rank writes its own pieces, one tensor after the other, by 32 MiB; a piece that several ranks hold is written once, by
    the one with the fewest bytes so far. The pointer ``latest`` is renamed into place after everything is on the disk: a save
    that is killed leaves the previous checkpoint the newest.

    Communication: one all-gather of 16 bytes a rank; where ranks have different states also a gather of their names and
    shapes. ValueError for a state that cannot be kept; RuntimeError on all ranks if one of them cannot write.
    """
    job = prepare(state, path, keep, timeout)
    return job.run({key: sources.streamed(part.local) for key, part in job.mine.items()})


@dataclass(frozen=True)
class Job:
    """One rank's part of a save."""

    folder: Path
    rank: int
    plan: Plan
    mine: dict[str, Part]
    """What this rank writes, by the keys in its file."""
    keep: int | None
    timeout: float

    def run(self, data: dict[str, Iterable[Any]]) -> Path:
        """Write the data, by keys; no framework, no collective. Returns when the checkpoint is the newest."""
        with rendezvous.telling(self.folder, self.rank):
            entries = self.plan.files[self.rank]
            in_order = (data.pop(entry.key) for entry in entries)
            folders.put(
                self.folder / file_name(self.rank),
                lambda part: safetensors_file.write(part, entries, in_order),
            )
            if self.rank == 0:
                rendezvous.wait_until(self._missing, self.folder, self.timeout)
                folders.publish(self.folder, self.plan.index)
        rendezvous.wait_until(self._unpublished, self.folder, self.timeout)
        if self.rank == 0 and self.keep is not None:
            folders.remove_old(self.folder, self.keep)
        return self.folder

    def _missing(self) -> list[str]:
        files = [self.folder / name for name in self.plan.index["files"]]
        return [str(file) for file in files if not file.exists()]

    def _unpublished(self) -> list[str]:
        if folders.is_complete(self.folder) and folders.is_pointed(self.folder):
            return []
        return [f"{self.folder.parent / folders.POINTER} of rank 0"]


def prepare(state: Any, path: str | os.PathLike[str], keep: int | None, timeout: float) -> Job:
    """Agree with the other ranks on the folder and on who writes what."""
    check_options(keep, timeout)
    wait_for_running()
    root = Path(path)
    problem: Exception | None = None
    found: dict[str, Source] = {}
    number, digest = FAILED, 0
    try:
        flat = flatten(state, sources.is_tensor)
        found = sources.sources_of(flat)
        digest = agreement.digest_of(flat, found)
        number = 0
    except ValueError as error:
        problem = error  # told to the others first, who would wait for this rank
    rank, world_size = agreement.join(found)
    if rank == 0 and problem is None:
        try:
            number = folders.make_new(root)
        except OSError as error:
            number, problem = FAILED, error
    told = agreement.tell(number, digest, world_size)
    folder = folders.folder_of(root, told[0][0])
    try:
        if problem is not None:
            raise problem
        refuse_failed(told, f"save to {root}")
        alike = all(theirs == digest for _, theirs in told) and not any(s.is_run for s in found.values())
        describe = agreement.known_state if alike else agreement.gathered_state
        plan = make_plan(describe(flat, found, world_size), world_size)
    except (ValueError, OSError, RuntimeError):
        if number > 0:
            folder.rmdir()  # this rank made it
        raise
    mine = {
        key: next(part for part in found[piece.name].parts if part.box == piece.box)
        for key, piece in plan.pieces[rank].items()
    }
    return Job(folder, rank, plan, mine, keep, timeout)


def check_options(keep: int | None, timeout: float) -> None:
    """ValueError for options that mean nothing."""
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep is how many checkpoints stay, 1 or more, or None for all; got {keep!r}")
    if not timeout > 0:
        raise ValueError(f"timeout is a positive number of seconds, got {timeout!r}")


def refuse_failed(told: list[tuple[int, int]], what: str) -> None:
    """RuntimeError if a rank has told that it cannot take part."""
    failed = [rank for rank, (number, _) in enumerate(told) if number == FAILED]
    if failed:
        raise RuntimeError(
            f"{what}: rank {', '.join(map(str, failed))} cannot take part and says why in an error of its own; nothing was written"
        )


def wait_for_running() -> None:
    """A save in the background comes to its end first. Its error, if it has one, is told by its own handle."""
    if _process.state.writing is not None:
        concurrent.futures.wait([_process.state.writing])
