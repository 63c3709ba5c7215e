"""`python -m bench.cases.recompute_picture ROWS.jsonl PICTURE.svg`: memory against time of all sides of measured rows of `recompute`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 960, 460
LEFT, RIGHT, TOP, BOTTOM = 64.0, 936.0, 28.0, 412.0
NUM_LABELS = 5
GIB = 2**30
COLORS = {"plain": "#444444", "torch": "#4c78a8", "ours": "#e45756"}

Point = tuple[float, float]
"""Milliseconds of a step, and GiB at its peak."""


def points(lines: Sequence[str]) -> dict[str, Point]:
    """By side; ValueError if the rows hold no memory, as those that were measured without a GPU."""
    found: dict[str, Point] = {}
    for line in lines:
        for side, values in json.loads(line)["sides"].items():
            if values["peak_bytes"] is None:
                raise ValueError(f"the row of {side} has no memory: measure on a GPU")
            found[side] = (values["milliseconds"], values["peak_bytes"] / GIB)
    return found


def drawing(found: Mapping[str, Point]) -> str:
    """An SVG; equal points make equal files."""
    slowest, largest = (max(each[axis] for each in found.values()) * 1.15 for axis in (0, 1))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT - 40, TOP - 12, "GiB at the peak of a step", "start"),
        _text((LEFT + RIGHT) / 2, BOTTOM + 38, "milliseconds of forward and backward", "middle"),
    ]
    for part in range(NUM_LABELS + 1):
        share = part / NUM_LABELS
        y = BOTTOM - (BOTTOM - TOP) * share
        lines.append(f'<path d="M{LEFT:.1f} {y:.1f}L{RIGHT:.1f} {y:.1f}" stroke="#dddddd"/>')
        lines.append(_text(LEFT - 8, y + 4, f"{largest * share:.1f}", "end"))
        lines.append(_text(LEFT + (RIGHT - LEFT) * share, BOTTOM + 18, f"{slowest * share:.0f}", "middle"))
    for side, (milliseconds, memory) in sorted(found.items()):
        x = LEFT + (RIGHT - LEFT) * milliseconds / slowest
        y = BOTTOM - (BOTTOM - TOP) * memory / largest
        first = side.partition(" ")[0]
        color = COLORS.get(first, COLORS["ours"])
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color}"/>')
        lines.append(
            _text(x - 8 if x > RIGHT - 200 else x + 8, y - 6, side, "end" if x > RIGHT - 200 else "start")
        )
    return "\n".join([*lines, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def main(arguments: Sequence[str]) -> int:
    """Read the rows, write the picture."""
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    rows, picture = map(Path, arguments)
    lines = rows.read_text(encoding="utf-8").splitlines()
    picture.write_text(drawing(points(lines)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
