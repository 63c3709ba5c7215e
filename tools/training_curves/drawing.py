"""The picture: bits per byte over steps, the best run of each optimizer in front of its others."""

from collections.abc import Sequence
from dataclasses import dataclass

from training_curves.curves import WINDOW, Curve, best, first_below

WIDTH, HEIGHT = 960, 460
LEFT, RIGHT, TOP, BOTTOM = 56.0, 936.0, 28.0, 412.0
NUM_LABELS = 6
SPAN = 2.5
"""Bits per byte that are shown: the steep fall of the first steps, in which nothing is decided, would hide the rest."""
COLORS = {"adamw": "#4c78a8", "muon": "#e45756"}
STROKES = {True: (2.5, 1.0), False: (1.2, 0.45)}
"""Width and opacity of the best run of an optimizer, and of its others."""
NAMES = {"adamw": "AdamW", "muon": "Muon and AdamW"}


@dataclass(frozen=True)
class _Scale:
    """From steps and bits to places in the picture."""

    steps: int
    low: float
    high: float

    def x(self, step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / self.steps

    def y(self, bits: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (bits - self.low) / (self.high - self.low)


def drawing(curves: Sequence[Curve]) -> str:
    """An SVG; equal curves make equal files."""
    low = int(min(curve.bits[-1] for curve in curves) * 2) / 2
    scale = _Scale(max(len(curve.bits) for curve in curves), low, low + SPAN)
    winners = {name: best(curves, name) for name in COLORS}
    in_front = set(winners.values())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_axes(scale),
        *(_path(curve, scale, is_best=False) for curve in curves if curve not in in_front),
        *(_path(curve, scale, is_best=True) for curve in winners.values()),
        *_reached(winners, scale),
        *_legend(curves, in_front),
        "</svg>",
    ]
    return "\n".join([*lines, ""])


def _axes(scale: _Scale) -> list[str]:
    lines = [_text(LEFT - 8, TOP - 12, "bits per byte", "start")]
    for half in range(round((scale.high - scale.low) * 2) + 1):
        bits = scale.low + half / 2
        lines.append(_line((LEFT, scale.y(bits)), (RIGHT, scale.y(bits)), "#dddddd"))
        lines.append(_text(LEFT - 8, scale.y(bits) + 4, f"{bits:.1f}", "end"))
    for part in range(NUM_LABELS + 1):
        step = scale.steps * part // NUM_LABELS
        lines.append(_text(scale.x(step), BOTTOM + 18, str(step), "middle"))
    lines.append(_text((LEFT + RIGHT) / 2, BOTTOM + 38, "step", "middle"))
    return lines


def _path(curve: Curve, scale: _Scale, *, is_best: bool) -> str:
    points = [
        f"{scale.x(place + 1):.1f} {scale.y(bits):.1f}"
        for place, bits in enumerate(curve.bits)
        if place + 1 >= WINDOW and bits <= scale.high
    ]
    width, opacity = STROKES[is_best]
    return (
        f'<path d="M{"L".join(points)}" fill="none" stroke="{COLORS[curve.optimizer]}" stroke-width="{width}" '
        f'stroke-opacity="{opacity}"/>'
    )


def _reached(winners: dict[str, Curve], scale: _Scale) -> list[str]:
    """Where Muon has what AdamW ends with; nothing if it never has."""
    level = winners["adamw"].bits[-1]
    step = first_below(winners["muon"], level)
    if step is None:
        return []
    x, y = scale.x(step), scale.y(level)
    return [
        _line((x, y), (RIGHT, y), "#444444", ' stroke-dasharray="4 4"'),
        _line((x, y), (x, BOTTOM), "#444444", ' stroke-dasharray="4 4"'),
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#444444"/>',
        _text(x - 8, BOTTOM - 8, f"step {step}", "end"),
    ]


def _legend(curves: Sequence[Curve], in_front: set[Curve]) -> list[str]:
    """Names and scores, the best run first, in the empty corner above the curves."""
    x, y = RIGHT - 270, TOP + 30
    lines = [_text(x + 32, y - 6, "peak rate: held-out bits per byte", "start")]
    for place, curve in enumerate(sorted(curves, key=lambda each: each.validation)):
        is_best = curve in in_front
        width, opacity = STROKES[is_best]
        at = y + 18 * (place + 1)
        stroke = f' stroke-width="{width}" stroke-opacity="{opacity}"'
        lines.append(_line((x, at - 4), (x + 24, at - 4), COLORS[curve.optimizer], stroke))
        text = f"{NAMES[curve.optimizer]}, {curve.rate}: {curve.validation:.3f}"
        lines.append(_text(x + 32, at, text, "start", more=' font-weight="bold"' if is_best else ""))
    return lines


def _line(start: tuple[float, float], end: tuple[float, float], color: str, more: str = "") -> str:
    return f'<path d="M{start[0]:.1f} {start[1]:.1f}L{end[0]:.1f} {end[1]:.1f}" stroke="{color}"{more}/>'


def _text(x: float, y: float, text: str, anchor: str, color: str = "black", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}"{more}>{text}</text>'
