"""``async_save``: copies to the host at once, writes on a thread.

[Note: the thread] It gets numpy arrays and a plan and talks to other ranks by files, so it meets neither the framework nor the
collectives of training. It is no daemon: a program that ends normally waits for it. A program that is killed leaves the
previous checkpoint the newest, as with ``save``.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

from hp_dtensor.checkpoint import rendezvous, sources
from hp_dtensor.checkpoint.saving import DEFAULT_TIMEOUT, Job, prepare
from hp_platform import _process

_logger = logging.getLogger("hp_dtensor.checkpoint")


class SaveHandle:
    """A save that is under way. Made by :func:`async_save`."""

    def __init__(self, folder: Path, future: Future[Path]) -> None:
        self._future = future
        self.folder = folder
        """Where it writes to."""

    def done(self) -> bool:
        """Whether it has ended, well or not. Does not wait."""
        return self._future.done()

    def wait(self) -> Path:
        """Wait for the end; returns the folder, which is complete and the newest, or raises what went wrong."""
        return self._future.result()

    def result(self, timeout: float | None = None) -> Path:
        """:meth:`wait` for at most ``timeout`` seconds; TimeoutError if it is still writing then."""
        try:
            return self._future.result(timeout)
        except FutureTimeoutError as error:
            if self._future.done():
                raise
            raise TimeoutError(
                f"the save to {self.folder} has not ended after {timeout} s; it goes on"
            ) from error

    def __repr__(self) -> str:
        state = "writing" if not self.done() else "failed" if self._future.exception() else "saved"
        return f"SaveHandle({str(self.folder)!r}, {state})"


def async_save(
    state: Any, path: str | os.PathLike[str], *, keep: int | None = None, timeout: float = DEFAULT_TIMEOUT
) -> SaveHandle:
    """:func:`hp_dtensor.save` that returns when the state is copied to the host. All ranks call.

    What this rank will write is copied before it returns (on every device, also cpu), so the state may be changed at once;
    writing goes on in a thread. The copy takes as much host memory as this rank writes. A save that is still running is waited
    for first. An error of the writing is logged, and raised by ``wait()`` or ``result()`` of the handle.

    Args and communication: as :func:`hp_dtensor.save`; the thread starts no collective.
    """
    job = prepare(state, path, keep, timeout)
    with rendezvous.telling(job.folder, job.rank):
        copies: dict[str, Any] = {key: [bits] for key, bits in sources.staged(job.mine).items()}
    future: Future[Path] = Future()
    _process.state.writing = future
    threading.Thread(target=_write, args=(job, copies, future), name=f"save to {job.folder}").start()
    return SaveHandle(job.folder, future)


def _write(job: Job, copies: dict[str, Any], future: Future[Path]) -> None:
    try:
        folder = job.run(copies)
    except BaseException as error:  # whatever it is, wait() raises it
        _logger.error("the save to %s failed: %s", job.folder, error)
        future.set_exception(error)
    else:
        future.set_result(folder)
