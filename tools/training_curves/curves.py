"""What a run has left: its losses, and what it scored on held-out text."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

OUTPUT = "output.txt"
WINDOW = 20
"""Steps of which the mean is shown: batches differ by more than optimizers do."""
_AFTER = re.compile(r"^validation after: +([0-9.]+) bits per byte$", re.MULTILINE)


@dataclass(frozen=True)
class Curve:
    """One run."""

    optimizer: str
    rate: str
    bits: tuple[float, ...]
    """Of every step: the mean loss of the last :data:`WINDOW` batches, bits per byte."""
    validation: float
    """Bits per byte of the held-out text at the end."""


def read(folder: Path, optimizer: str, rate: str) -> Curve:
    """The run in a folder. ValueError if it did not come to its end."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    after = _AFTER.search((folder / OUTPUT).read_text())
    if after is None or not rows:
        raise ValueError(f"{folder} has no finished run: remove it, and start again")
    losses = [row["loss"] / math.log(2) for row in rows]
    return Curve(optimizer, rate, smoothed(losses), float(after[1]))


def smoothed(values: Sequence[float]) -> tuple[float, ...]:
    """Of every place the mean of it and of those before it in the window."""
    windows = [values[max(0, place + 1 - WINDOW) : place + 1] for place in range(len(values))]
    return tuple(sum(window) / len(window) for window in windows)


def best(curves: Sequence[Curve], optimizer: str) -> Curve:
    """The run with the lowest score on held-out text."""
    return min(
        (curve for curve in curves if curve.optimizer == optimizer), key=lambda curve: curve.validation
    )


def first_below(curve: Curve, level: float) -> int | None:
    """The first step, from 1, behind which the curve is at the level or below; None if it never is."""
    return next(
        (place + 1 for place, bits in enumerate(curve.bits) if place + 1 >= WINDOW and bits <= level), None
    )


def table(curves: Sequence[Curve]) -> str:
    """A row per run, as Markdown."""
    rows = ["| optimizer | peak rate | training, last 20 steps | held-out text |", "|---|---|---|---|"]
    rows.extend(
        f"| {curve.optimizer} | {curve.rate} | {curve.bits[-1]:.3f} | {curve.validation:.3f} |"
        for curve in curves
    )
    return "\n".join(rows)
