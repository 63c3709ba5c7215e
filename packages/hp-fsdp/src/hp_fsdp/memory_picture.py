"""``show_memory``: a rank's memory over a training step, as a table and as a drawing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from hp_fsdp.memory import MEBI, MemoryPlan
from hp_fsdp.memory_steps import LAYERS, Moment, moments_of

_COLORS = {
    "shards": "#4c78a8",
    "optimizer": "#9ecae9",
    "gradients": "#72b7b2",
    "root": "#54a24b",
    "running": "#8bd07e",
    "ahead": "#d0edca",
    "whole_gradients": "#eeca3b",
    "reductions": "#f58518",
    "activations": "#b279a2",
}
_WIDTH, _HEIGHT = 960, 470
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 276, 40, 62
"""Room around the plot."""


def show_memory(
    plan: MemoryPlan,
    *,
    activations: int | Mapping[str, int] = 0,
    optimizer_state: int = 0,
    path: str | os.PathLike[str] | None = None,
) -> str:
    """What lies in a rank's memory while each unit runs forward and backward, as text; with ``path`` as a drawing, too.

    Columns of the text are what memory is used for, in MiB; rows are the moments of a step. It is one after the first two:
    units are gathered ahead, and the optimizer has its state. The units but the root are taken to run in the order of the
    plan. The memory on the device is shown, without what a gather needs beside (:attr:`UnitMemory.staging`) and without what
    allocators round up.

    Args:
        plan: of :func:`memory_plan`.
        activations: bytes that each unit but the root keeps from forward to backward, or name -> bytes; names as in the plan.
        optimizer_state: bytes on the device; AdamW has two numbers for each of the shards: ``2 * plan.shards``.
        path: of an .svg file to write. Equal plans make equal files.

    ValueError for negative bytes, an unknown name, or another kind of file. Communication: none; any rank may call.
    """
    names = [unit.name for unit in plan.units]
    given = activations if isinstance(activations, Mapping) else {}
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ValueError(f"activations are given for {unknown!r}, and the units of the plan are {names!r}")
    numbers = [*given.values(), optimizer_state, 0 if isinstance(activations, Mapping) else activations]
    if min(numbers) < 0:
        raise ValueError(f"activations and optimizer_state are bytes, at least 0, got {min(numbers)}")
    if path is not None and Path(path).suffix.lower() != ".svg":
        raise ValueError(f"a drawing of memory is written to a file with suffix .svg, got {str(path)!r}")
    moments = moments_of(plan, activations=activations, optimizer_state=optimizer_state)
    if path is not None:
        Path(path).write_text(_drawing(moments), encoding="utf-8")
    return _text(moments)


def _label(moment: Moment) -> str:
    return "step" if moment.phase == "optimizer" else moment.unit or "root"


def _text(moments: Sequence[Moment]) -> str:
    used = [layer for layer in LAYERS if any(moment.nbytes[layer] for moment in moments)]
    columns = ["phase", "unit", *used, "total"]
    rows = [columns]
    for moment in moments:
        figures = [f"{moment.nbytes[layer] / MEBI:.2f}" for layer in used]
        rows.append([moment.phase, _label(moment), *figures, f"{moment.total / MEBI:.2f}"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns))]
    lines = []
    for row in rows:
        names = [f"{cell:{width}}" for cell, width in zip(row[:2], widths[:2], strict=True)]
        figures = [f"{cell:>{width}}" for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join([*names, *figures]))
    return "\n".join(lines)


def _drawing(moments: Sequence[Moment]) -> str:
    """Columns of equal width, as high as their bytes; written by hand, so that it needs nothing and is the same everywhere."""
    peak = max(moments, key=lambda moment: moment.total)
    step = _tick(peak.total / MEBI)
    # One tick above the highest, so that its label has room.
    top = (int(peak.total / MEBI / step) + 1) * step * MEBI
    width = (_WIDTH - _LEFT - _RIGHT) / len(moments)
    floor = _HEIGHT - _BOTTOM

    def y(nbytes: float) -> float:
        return floor - nbytes / top * (floor - _TOP)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for number in range(int(top / MEBI / step) + 1):
        at = y(number * step * MEBI)
        lines.append(
            f'<path d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}" stroke="#dddddd"/>{_words(_LEFT - 8, at + 4, f"{number * step:g}", anchor="end")}'
        )
    lines.append(_words(_LEFT - 8, _TOP - 16, "MiB", anchor="end"))
    for column, moment in enumerate(moments):
        below = 0
        for layer in LAYERS:
            nbytes = moment.nbytes[layer]
            if nbytes:
                lines.append(
                    f'<rect x="{_LEFT + column * width:.1f}" y="{y(below + nbytes):.1f}" width="{width:.1f}" '
                    f'height="{y(below) - y(below + nbytes):.1f}" fill="{_COLORS[layer]}" stroke="white" stroke-width="0.6">'
                    f"<title>{escape(f'{moment.phase}, {_label(moment)}: {LAYERS[layer]}, {nbytes / MEBI:.1f} MiB')}</title></rect>"
                )
            below = below + nbytes
        middle = _LEFT + (column + 0.5) * width
        lines.append(_words(middle, floor + 14, _label(moment), turned=True))
        if moment is peak:
            lines.append(_words(middle, y(below) - 6, f"{below / MEBI:.0f}", anchor="middle", bold=True))
    start = 0
    for phase, group in groupby(moments, key=lambda moment: moment.phase):
        count = len(list(group))
        left, right = _LEFT + start * width, _LEFT + (start + count) * width
        if start:
            lines.append(
                f'<path d="M{left:.1f} {_TOP - 8}V{floor}" stroke="#888888" stroke-dasharray="4 3"/>'
            )
        lines.append(_words((left + right) / 2, _TOP - 16, phase, anchor="middle", bold=True))
        start = start + count
    used = [layer for layer in reversed(tuple(LAYERS)) if any(moment.nbytes[layer] for moment in moments)]
    for row, layer in enumerate(used):
        at = _TOP + 22 * row
        left = _WIDTH - _RIGHT + 18
        lines.append(f'<rect x="{left}" y="{at}" width="13" height="13" fill="{_COLORS[layer]}"/>')
        lines.append(_words(left + 20, at + 11, LAYERS[layer]))
    return "\n".join([*lines, "</svg>", ""])


def _tick(peak: float) -> float:
    """A round number of MiB, of which four to ten make ``peak``."""
    power = 10.0 ** (len(str(int(max(peak, 1)))) - 2)
    return next(power * n for n in (1.0, 2.0, 5.0, 10.0) if peak / (power * n) <= 10) if peak else 1.0


def _words(
    x: Any, y: float, text: str, *, anchor: str = "start", bold: bool = False, turned: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    if turned:
        anchor, weight = "end", f' transform="rotate(-45 {x:.1f} {y:.1f})"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
