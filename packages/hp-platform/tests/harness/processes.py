"""Helpers of this folder: what became of processes."""

from __future__ import annotations

import os
import time
from pathlib import Path


def note_pid(folder: Path, name: object, pid: int | None = None) -> None:
    """Leave a process id where the test finds it."""
    (folder / f"{name}.pid").write_text(str(os.getpid() if pid is None else pid))


def noted_pids(folder: Path, number: int, seconds: float = 20.0) -> list[int]:
    """The ids, once all are there."""
    deadline = time.monotonic() + seconds
    while True:
        texts = [file.read_text() for file in sorted(folder.glob("*.pid"))]
        if len(texts) == number and all(texts):
            return [int(text) for text in texts]
        assert time.monotonic() < deadline, f"only {texts} of {number} processes came up"
        time.sleep(0.02)


def assert_gone(pids: list[int], seconds: float) -> None:
    """None of the processes runs after that time (a zombie that init has not collected yet does not run)."""
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, f"processes {alive} still run after {seconds} s"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
