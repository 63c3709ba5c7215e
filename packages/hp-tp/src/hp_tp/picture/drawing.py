"""The stages of a plan as a drawing: one row per module, in the form activation x weight = activation.

Written by hand, so that it needs no library and equal plans make equal files.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hp_tp.picture.stages import Stage, Way, Weight

_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")
"""Of ranks, in turn."""
_WHOLE, _INK, _FAINT = "#d5d8dc", "#222222", "#767676"
_TOP, _ROW, _FOOT = 46, 66, 60
_TALL, _WIDE = 40, 58
"""Of the picture of a matrix."""
_NAME, _COMES, _FRONT, _USED, _TIMES, _WEIGHT, _EQUALS, _GIVES, _BEHIND, _LEAVES = (
    16,
    262,
    328,
    434,
    503,
    516,
    585,
    598,
    664,
    770,
)
"""Where columns begin."""
_WIDTH = _LEAVES + _WIDE + 16


def drawing(stages: Sequence[Stage], num_ranks: int) -> str:
    """The text of an SVG file."""
    height = _TOP + _ROW * len(stages) + _FOOT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        *_heads(),
    ]
    for number, stage in enumerate(stages):
        top = _TOP + _ROW * number
        if number % 2 == 0:
            lines.append(f'<rect x="0" y="{top}" width="{_WIDTH}" height="{_ROW}" fill="#f6f7f9"/>')
        lines.extend(_row(stage, top, num_ranks))
    return "\n".join([*lines, *_legend(height - _FOOT + 14, num_ranks), "</svg>", ""])


def _heads() -> list[str]:
    titles = (
        (_NAME, "module", "start"),
        (_COMES + _WIDE / 2, "comes as", "middle"),
        (_USED + _WIDE / 2, "used as", "middle"),
        (_WEIGHT + _WIDE / 2, "weight", "middle"),
        (_GIVES + _WIDE / 2, "gives", "middle"),
        (_LEAVES + _WIDE / 2, "leaves as", "middle"),
    )
    lines = [_words(x, 24, title, anchor=anchor, bold=True) for x, title, anchor in titles]
    for left, right in ((_COMES, _USED), (_GIVES, _LEAVES)):
        middle = (left + _WIDE + right) / 2
        lines.append(_words(middle, 20, "forward →", anchor="middle", size=11))
        lines.append(_words(middle, 36, "← backward", anchor="middle", size=11, color=_FAINT))
    return lines


def _row(stage: Stage, top: float, num_ranks: int) -> list[str]:
    middle = top + _ROW / 2
    lines = [
        _words(_NAME, middle - 12, stage.name, bold=True),
        _words(_NAME, middle + 4, stage.style),
        _words(_NAME, middle + 19, stage.note, size=10.5, color=_FAINT),
    ]
    y = middle - _TALL / 2
    lines.extend(_activation(_COMES, y, stage.comes, num_ranks))
    lines.extend(_travel(_COMES + _WIDE, _USED, middle, stage.in_front))
    lines.extend(_activation(_USED, y, stage.used, num_ranks))
    if stage.weight is not None:
        lines.append(_words(_TIMES, middle + 5, "×", anchor="middle", size=15))
        lines.extend(_matrix(_WEIGHT, y, stage.weight, num_ranks))
        lines.append(_words(_EQUALS, middle + 5, "=", anchor="middle", size=15))
    if stage.gives is not None:
        lines.extend(_activation(_GIVES, y, stage.gives, num_ranks))
    if stage.leaves is not None:
        lines.extend(_travel(_GIVES + _WIDE, _LEAVES, middle, stage.behind))
        lines.extend(_activation(_LEAVES, y, stage.leaves, num_ranks))
    return lines


def _travel(left: float, right: float, middle: float, way: Way) -> list[str]:
    """An arrow with what travels forward above and what travels backward below it."""
    color = _INK if way.forward else "#b5b5b5"
    tip = right - 8
    lines = [
        f'<path d="M{left + 6} {middle}H{tip}m-5 -4l5 4l-5 4" fill="none" stroke="{color}" stroke-width="1.4"/>'
    ]
    center = (left + right) / 2
    if way.forward:
        lines.append(_words(center, middle - 6, way.forward, anchor="middle", size=11))
    if way.backward:
        lines.append(_words(center, middle + 16, way.backward, anchor="middle", size=11, color=_FAINT))
    return lines


def _activation(x: float, y: float, lies: str, num_ranks: int) -> list[str]:
    """Tokens downwards, features across."""
    if lies == "summands":
        # One sheet per rank, behind each other.
        count, step = min(num_ranks, 4), 4
        wide, tall = _WIDE - step * (count - 1), _TALL - step * (count - 1)
        lines = [
            _rect(
                x + step * (count - 1 - k), y + step * k, wide, tall, _COLORS[(count - 1 - k) % len(_COLORS)]
            )
            for k in range(count)
        ]
        sheet = y + step * (count - 1)
        return [
            *lines,
            _words(x + wide / 2, sheet + tall / 2 + 6, "+", anchor="middle", size=17, color="white"),
        ]
    if lies == "tokens":
        return _stripes(x, y, _WIDE, _TALL, num_ranks, down=True)
    if lies == "features":
        return _stripes(x, y, _WIDE, _TALL, num_ranks, down=False)
    wide = 14 if lies == "ids" else _WIDE
    return [_rect(x + (_WIDE - wide) / 2, y, wide, _TALL, _WHOLE)]


def _matrix(x: float, y: float, weight: Weight, num_ranks: int) -> list[str]:
    """Input features downwards, output features across: as it stands in x @ W."""
    tall = 12 if weight.is_vector else _TALL
    y = y + (_TALL - tall) / 2
    if weight.cut is None:
        return [_rect(x, y, _WIDE, tall, _WHOLE)]
    return _stripes(x, y, _WIDE, tall, num_ranks, down=weight.cut == "rows")


def _stripes(x: float, y: float, wide: float, tall: float, count: int, *, down: bool) -> list[str]:
    lines: list[str] = []
    for k in range(count):
        color = _COLORS[k % len(_COLORS)]
        if down:
            lines.append(_rect(x, y + tall * k / count, wide, tall / count, color))
        else:
            lines.append(_rect(x + wide * k / count, y, wide / count, tall, color))
    return lines


def _legend(y: float, num_ranks: int) -> list[str]:
    lines: list[str] = []
    x = float(_NAME)
    for k in range(min(num_ranks, len(_COLORS))):
        lines.extend((_rect(x, y, 13, 13, _COLORS[k]), _words(x + 18, y + 11, f"rank {k}")))
        x = x + 70
    lines.extend((_rect(x, y, 13, 13, _WHOLE), _words(x + 18, y + 11, "whole on every rank")))
    x = x + 160
    lines.append(_words(x, y + 11, "+  every rank has a summand"))
    axes = "activations: tokens downwards, features across; weights: in downwards, out across"
    return [*lines, _words(_NAME, y + 32, axes, size=11, color=_FAINT)]


def _rect(x: float, y: float, wide: float, tall: float, color: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" fill="{color}" stroke="white" '
        f'stroke-width="1"/>'
    )


def _words(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    bold: bool = False,
    size: float = 12,
    color: str = _INK,
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    sized = f' font-size="{size:g}"' if size != 12 else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}"{sized}{weight}>{escape(text)}</text>'
