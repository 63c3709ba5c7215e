"""What the commands share."""

from __future__ import annotations

import argparse
from pathlib import Path


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
