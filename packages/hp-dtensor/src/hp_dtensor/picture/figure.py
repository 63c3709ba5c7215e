"""A picture of blocks as a drawing, by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_dtensor.picture.blocks import Panel, Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")
_SUFFIXES = (".svg", ".png", ".pdf")
_INCHES = 3.2
"""Longer side of a panel."""


def save_figure(picture: Picture, path: Path) -> None:
    """Write the drawing; the suffix of ``path`` says how. Blocks are as large as they are; replicas and parts share one."""
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(
            f"a drawing is written to a file with suffix {', '.join(_SUFFIXES)}, got {str(path)!r}"
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "a drawing needs matplotlib, which is not installed: pip install 'hp-dtensor[plot]', or leave out path= for text"
        ) from error
    count = max(len(picture.panels), 1)
    columns = min(count, 4)
    rows = -(-count // columns)
    figure = Figure(figsize=(max(_INCHES * columns, 4.0) + 0.6, _INCHES * rows + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes:
        ax.set_axis_off()
    for ax, panel in zip(axes, picture.panels, strict=False):
        _draw(ax, panel, picture)
    note = f"\nwithout elements: {', '.join(map(str, picture.idle))}" if picture.idle else ""
    figure.suptitle(picture.title.replace(" on ", "\non ") + note, fontsize=8)
    figure.savefig(path, dpi=150)


def _draw(ax: Axes, panel: Panel, picture: Picture) -> None:
    from matplotlib.patches import Rectangle

    tall, wide = panel.rows[-1][1] - panel.rows[0][0], panel.columns[-1][1] - panel.columns[0][0]
    # A long side is shortened to four times the short one, so that thin tensors can be read.
    scale_y = 1.0 if wide < 4 * tall else wide / (4 * tall)
    scale_x = 1.0 if tall < 4 * wide else tall / (4 * wide)
    for (row, column), held in panel.cells.items():
        x, y = column[0] * scale_x, row[0] * scale_y
        width, height = (column[1] - column[0]) * scale_x, (row[1] - row[0]) * scale_y
        color = _COLORS[held.copies[0][0] % len(_COLORS)]
        ax.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="white", linewidth=2))
        ax.text(x + width / 2, y + height / 2, held.label, ha="center", va="center", color="white", wrap=True)
    ax.set_axis_on()
    ax.set_aspect("equal")
    ax.set_xlim(panel.columns[0][0] * scale_x, panel.columns[-1][1] * scale_x)
    ax.set_ylim(panel.rows[-1][1] * scale_y, panel.rows[0][0] * scale_y)  # the first row on top
    _ticks(ax, "x", panel.columns, scale_x, picture.column_dim)
    _ticks(ax, "y", panel.rows, scale_y, picture.row_dim)
    ax.set_title(panel.title, fontsize=9)
    for side in ax.spines.values():
        side.set_visible(False)


def _ticks(ax: Any, axis: str, spans: Any, scale: float, dim: int | None) -> None:
    edges = [] if dim is None else sorted({edge for span in spans for edge in span})
    getattr(ax, f"set_{axis}ticks")([edge * scale for edge in edges], [str(edge) for edge in edges])
    getattr(ax, f"set_{axis}label")("" if dim is None else f"dim {dim}")
    ax.tick_params(length=0)
