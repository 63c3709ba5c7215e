"""`python -m bench.cases.recompute_picture ROWS.jsonl PICTURE.svg`: memory against time of all sides of measured rows of `recompute`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path

from bench.cases.recompute_settings import PARTS, Side

WIDTH, HEIGHT = 960, 520
LEFT, RIGHT, TOP, BOTTOM = 56.0, 936.0, 74.0, 468.0
GIB = 2**30
COLORS = {"all kept": "#444444", "hp-recompute": "#c8373a", "torch": "#2f6398"}
SIZE = 12
"""Of letters."""

Point = tuple[float, float]
"""Milliseconds of a step, and GiB at its peak."""
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


@dataclass(frozen=True)
class Rows:
    """What the picture shows."""

    points: Mapping[str, Point]
    """By side."""
    title: str
    conditions: str


@dataclass
class _Taken:
    """Where something is drawn already."""

    boxes: list[Box] = field(default_factory=list)

    def is_free(self, box: Box) -> bool:
        """Whether nothing is there, and the frame holds it."""
        left, top, right, bottom = box
        if left < LEFT or right > RIGHT or top < TOP or bottom > BOTTOM:
            return False
        return all(
            right <= other[0] or left >= other[2] or bottom <= other[1] or top >= other[3]
            for other in self.boxes
        )


def read(lines: Sequence[str]) -> Rows:
    """ValueError if there are no rows, or if they hold no memory, as those that were measured without a GPU.

    Of a side that several rows have, the last one counts.
    """
    found: dict[str, Point] = {}
    title = conditions = ""
    for line in lines:
        row = json.loads(line)
        for side, values in row["sides"].items():
            if values["peak_bytes"] is None:
                raise ValueError(f"the row of {side} has no memory: measure on a GPU")
            found[side] = (values["milliseconds"], values["peak_bytes"] / GIB)
        sizes, where = row["sizes"], row["conditions"]
        title = (
            f"Memory against time: forward and backward of {sizes['layers']} layers, {sizes['dim']} wide, "
            f"{sizes['length']} tokens"
        )
        versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
        conditions = f"{where['hardware']}; {versions}; commit {where['commit']}"
    if not found:
        raise ValueError("there are no rows: give the file that bench recompute --json has written")
    return Rows(found, title, conditions)


def drawing(rows: Rows) -> str:
    """An SVG; equal rows make equal files. Time has a logarithmic axis, and memory does not begin at 0."""
    times, memories = zip(*rows.points.values(), strict=True)
    first, last = math.log(min(times) * 0.9), math.log(max(times) * 1.12)
    least, most = math.floor(min(memories) - 0.5), math.ceil(max(memories) + 0.5)

    def at(point: Point) -> Point:
        x = LEFT + (RIGHT - LEFT) * (math.log(point[0]) - first) / (last - first)
        return x, BOTTOM - (BOTTOM - TOP) * (point[1] - least) / (most - least)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="{SIZE}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="16" y="22" font-size="15" font-weight="bold">{escape(rows.title)}</text>',
        f'<text x="16" y="40" fill="#666666">{escape(rows.conditions)}</text>',
        _text(16, TOP - 12, "GiB at the peak of a step", "start"),
        _text(
            (LEFT + RIGHT) / 2, BOTTOM + 40, "milliseconds of forward and backward (logarithmic)", "middle"
        ),
    ]
    for memory in range(least, most + 1, max(1, (most - least) // 8)):
        y = at((times[0], memory))[1]
        lines.append(f'<path d="M{LEFT:.1f} {y:.1f}L{RIGHT:.1f} {y:.1f}" stroke="#e4e4e4"/>')
        lines.append(_text(LEFT - 8, y + 4, str(memory), "end"))
    before = LEFT
    for time in _ticks(math.exp(first), math.exp(last)):
        x = at((time, least))[0]
        if x - before >= 34 and x <= RIGHT - 10:
            lines.append(f'<path d="M{x:.1f} {TOP:.1f}L{x:.1f} {BOTTOM:.1f}" stroke="#e4e4e4"/>')
            lines.append(_text(x, BOTTOM + 18, f"{time:.0f}", "middle"))
            before = x
    taken = _Taken()
    x = RIGHT
    for name, color in reversed(COLORS.items()):
        x = x - 0.6 * SIZE * len(name) - 24
        lines.append(f'<circle cx="{x:.1f}" cy="{TOP - 16:.1f}" r="4" fill="{color}"/>')
        lines.append(_text(x + 8, TOP - 12, name, "start"))
    places = {side: at(point) for side, point in rows.points.items()}
    taken.boxes.extend((x - 6, y - 6, x + 6, y + 6) for x, y in places.values())
    parts = {side.value: part for side, part in PARTS.items()} | {Side.PLAIN.value: 1.0}
    curve = [places[side] for side in sorted(places.keys() & parts.keys(), key=lambda side: parts[side])]
    if len(curve) > 1:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in curve)
        lines.append(f'<path d="M{path}" fill="none" stroke="{COLORS["hp-recompute"]}" stroke-width="1.5"/>')
        taken.boxes.extend(_along(curve))
    for side, (x, y) in sorted(places.items(), key=lambda each: each[1]):
        color = COLORS[_series(side)]
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color}"/>')
        lines.append(_label(side, x, y, taken, color))
    return "\n".join([*lines, "</svg>", ""])


def _along(curve: Sequence[Point]) -> Iterator[Box]:
    """Boxes of which each holds a piece of it."""
    for (x, y), (other_x, other_y) in pairwise(curve):
        for part in range(20):
            middle_x, middle_y = x + (other_x - x) * part / 20, y + (other_y - y) * part / 20
            yield middle_x - 4, middle_y - 4, middle_x + 4, middle_y + 4


def _series(side: str) -> str:
    if side == Side.PLAIN.value:
        return "all kept"
    return "torch" if side.startswith("torch ") else "hp-recompute"


def _ticks(first: float, last: float) -> Iterator[float]:
    """Round numbers, at most about ten."""
    for step in (10, 20, 25, 50, 100, 200, 500, 1000):
        if (last - first) / step <= 16:
            yield from range(math.ceil(first / step) * step, math.floor(last) + 1, step)
            return


def _label(side: str, x: float, y: float, taken: _Taken, color: str) -> str:
    """Beside the point where there is room, else where it is closest; with a line if it is not beside."""
    text = side.removeprefix("torch ")
    width = 0.56 * SIZE * len(text)
    for distance in range(0, 200, 6):
        for anchor, dx, dy in (
            ("start", 9, 4 + distance),
            ("start", 9, 4 - distance),
            ("end", -9, 4 + distance),
            ("end", -9, 4 - distance),
            ("middle", 0, 20 + distance),
            ("middle", 0, -11 - distance),
        ):
            start = {"start": x + dx, "end": x + dx - width, "middle": x - width / 2}[anchor]
            box = (start, y + dy - SIZE, start + width, y + dy + 3)
            if taken.is_free(box):
                taken.boxes.append(box)
                line = f'<path d="M{x:.1f} {y:.1f}L{x + dx:.1f} {y + dy - 4:.1f}" stroke="{color}" stroke-width="0.6"/>'
                return (line if distance > 12 else "") + _text(x + dx, y + dy, text, anchor, color)
    return _text(x, y - 11, text, "middle", color)


def _text(x: float, y: float, text: str, anchor: str, color: str = "#222222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'


def main(arguments: Sequence[str]) -> int:
    """Read the rows, write the picture."""
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    rows, picture = map(Path, arguments)
    lines = [line for line in rows.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    picture.write_text(drawing(read(lines)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
