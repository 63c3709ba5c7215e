"""A safetensors file that grows tensor by tensor, on a thread of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hp_dtensor.checkpoint import folders, safetensors_file, sources
from hp_dtensor.checkpoint.safetensors_file import Entry


class NoFile:
    """The stream of a rank that writes no file now."""

    error: OSError | None = None

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        return None


class GrowingFile:
    """A file that grows tensor by tensor, written behind the caller's back; the next one waits until the last is written."""

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
        self._path = path
        self._header = safetensors_file.header_of(entries, metadata)
        self._part = path.with_name(path.name + folders.UNFINISHED)
        self._pool = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None
        self.error: OSError | None = None
        """Why the file is not there; from then on tensors are left out."""

    def __enter__(self) -> GrowingFile:
        self._start(self._open)
        return self

    def add(self, full: Any) -> None:
        """The next tensor in the order of the entries."""
        self._settle()
        if self.error is None:
            pieces = list(sources.streamed(full))  # the framework is asked by this thread only
            self._start(self._append, pieces)

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._settle()
        if kind is None and self.error is None:
            self._start(self._finish)
            self._settle()
        self._pool.shutdown()

    def _start(self, work: Any, *args: Any) -> None:
        self._last = self._pool.submit(work, *args)

    def _settle(self) -> None:
        if self._last is not None:
            try:
                self._last.result()
            except OSError as error:
                self.error = error
            self._last = None

    def _open(self) -> None:
        with self._part.open("wb") as file:
            file.write(self._header)

    def _append(self, pieces: list[Any]) -> None:
        with self._part.open("ab") as file:
            for piece in pieces:
                file.write(piece.reshape(-1).view("u1").data)

    def _finish(self) -> None:
        with self._part.open("ab") as file:
            os.fsync(file.fileno())
        os.replace(self._part, self._path)
        folders.flush_folder(self._path.parent)
