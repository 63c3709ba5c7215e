"""What the commands share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def rows_named(patterns: Sequence[str], rows: Mapping[str, T]) -> list[T]:
    """Those whose name one of the patterns meets, in their order; without patterns all. ValueError for one that meets none."""
    unknown = [each for each in patterns if not any(fnmatch(name, each) for name in rows)]
    if unknown:
        raise ValueError(f"no row is named {', '.join(unknown)}; the rows are: {', '.join(rows)}")
    return [
        row for name, row in rows.items() if not patterns or any(fnmatch(name, each) for each in patterns)
    ]


def positive(text: str) -> int:
    """An argument that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def append_line(line: str, file: Path | None) -> None:
    """Print a line, and keep it in the file if one is given."""
    print(line, flush=True)
    if file is not None:
        with file.open("a", encoding="utf-8") as opened:
            opened.write(line + "\n")
