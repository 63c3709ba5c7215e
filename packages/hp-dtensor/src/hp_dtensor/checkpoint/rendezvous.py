"""Ranks wait for each other by files, so that a thread may do it: no collective, which would have to keep the order of training's."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from hp_dtensor.checkpoint import folders

_FAILED: Final = ".failed"
GRACE_SECONDS: Final = 30.0
"""So long a thread waits for other ranks when its own program has ended."""


@contextlib.contextmanager
def telling(folder: Path, rank: int) -> Iterator[None]:
    """What fails inside is told to the other ranks, if that can be written, and raised."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):  # a full disk, a folder that is gone: theirs is the error above
            folders.put_text(folder / f"rank-{rank:05d}{_FAILED}", f"{type(error).__name__}: {error}")
        raise


def wait_until(missing: Callable[[], list[str]], folder: Path, timeout: float) -> None:
    """Return when nothing is missing.

    RuntimeError if a rank has failed, if the folder is gone, or with what is missing after ``timeout`` seconds.
    """
    started, pause = time.monotonic(), 0.001
    while lacking := missing():
        for marker in sorted(folder.glob(f"*{_FAILED}")):
            raise RuntimeError(
                f"{marker.name.removesuffix(_FAILED)} could not save to {folder}: {marker.read_text(encoding='utf-8')}. The "
                f"checkpoint is incomplete; the previous one stays the newest"
            )
        if not folder.exists():
            raise RuntimeError(
                f"{folder} was removed while it was written: another job saves beside it with keep=; give each job a path of "
                f"its own"
            )
        waited = time.monotonic() - started
        limit = timeout if threading.main_thread().is_alive() else min(timeout, GRACE_SECONDS)
        if waited > limit:
            raise RuntimeError(
                f"waited {limit:.0f} s for {', '.join(lacking[:3])}{' ...' if len(lacking) > 3 else ''}: that rank is gone or "
                f"slow, or does not see the same file system. {folder} is incomplete; the previous checkpoint stays the newest"
            )
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
