"""Bytes to learn from, and the batch of every step.

A batch depends on (seed, step) alone, never on the number of processes: every process knows the whole batch and takes its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hp_platform import get_platform
from hyper_parallel.trainer.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

VALIDATION_SHARE = 0.05
VALIDATION_SEQUENCES = 64


@dataclass(frozen=True)
class Corpus:
    """Two byte strings: the end of the text is kept for validation."""

    train: bytes
    validation: bytes
    source: str


def load_corpus(data: str | None, length: int) -> Corpus:
    """Read the text. Raises :class:`UsageError` for what is missing, empty, binary, or too short for sequences of ``length``."""
    text, source = (
        (_documentation(), "CPython's documentation") if data is None else (_read(Path(data)), data)
    )
    held_out = max(int(len(text) * VALIDATION_SHARE), length + 1)
    needed = 4 * (length + 1)
    if len(text) < needed:
        raise UsageError(
            f"{source} has {len(text):,} bytes, too short: sequences of {length} need at least {needed:,}; give more text or a smaller --length"
        )
    return Corpus(text[:-held_out], text[-held_out:], source)


def batch(corpus: Corpus, *, seed: int, step: int, size: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a step: int64 ``(size, length)`` each, targets one byte further."""
    platform = get_platform()
    draws = platform.to_numpy(platform.random_bits(seed, step, 0, 2 * size)).reshape(size, 2)
    starts = ((draws[:, 0] << 31) | (draws[:, 1] >> 1)) % (len(corpus.train) - length)
    return _windows(corpus.train, starts, length)


def validation_batch(corpus: Corpus, *, length: int, multiple: int) -> tuple[np.ndarray, np.ndarray]:
    """Evenly spread windows of the held-out text, the same for every run; their number is a multiple of ``multiple``."""
    import numpy as np

    rows = -(-VALIDATION_SEQUENCES // multiple) * multiple
    last = len(corpus.validation) - length - 1
    return _windows(corpus.validation, np.linspace(0, last, rows).astype(np.int64), length)


def _windows(text: bytes, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    import numpy as np

    rows = np.frombuffer(text, np.uint8)[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    return rows[:, :-1], rows[:, 1:]


def _documentation() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UsageError(
            "this Python ships without pydoc_data.topics, the default text: give --data FILE_OR_FOLDER"
        ) from None
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def _read(path: Path) -> bytes:
    try:
        if not path.exists():
            raise UsageError(f"--data {path}: no such file or folder")
        if not path.is_dir() and not path.is_file():  # a device or a pipe may never end
            raise UsageError(f"--data {path}: neither a file nor a folder")
        files = (
            sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
            if path.is_dir()
            else [path]
        )
        if not files:
            raise UsageError(f"--data {path}: the folder holds no file")
        contents = [(file, file.read_bytes()) for file in files]
    except OSError as error:
        raise UsageError(f"--data {path}: cannot read {error.filename}: {error.strerror}") from None
    for file, content in contents:
        if b"\0" in content:
            raise UsageError(
                f"--data {file} is binary (a zero byte at position {content.index(0):,}): give text"
            )
        try:
            content.decode()
        except UnicodeDecodeError as error:
            raise UsageError(
                f"--data {file} is not UTF-8 text (byte {error.start:,}): convert it, or give another file"
            ) from None
    text = b"\n".join(content for _, content in contents)
    if not text.strip():
        raise UsageError(f"--data {path} is empty")
    return text
