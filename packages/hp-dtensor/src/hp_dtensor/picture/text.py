"""A picture of blocks as text, drawn with box characters."""

from __future__ import annotations

from hp_dtensor.picture.blocks import Panel, Picture, Span


def as_text(picture: Picture) -> str:
    """Several lines without a newline at the end."""
    lines = [picture.title]
    for panel in picture.panels:
        lines = [*lines, *([panel.title] if panel.title else []), *_panel(panel, picture)]
    if not picture.panels:
        lines = [*lines, "no elements"]
    if picture.idle:
        lines = [*lines, f"without elements: {', '.join(map(str, picture.idle))}"]
    return "\n".join(lines)


def _panel(panel: Panel, picture: Picture) -> list[str]:
    heads = ["" if picture.row_dim is None else _shown(span) for span in panel.rows]
    corner = "" if picture.row_dim is None else f"dim {picture.row_dim}"
    left = max(map(len, (corner, *heads)))
    labels = [[panel.cells[row, column].label for column in panel.columns] for row in panel.rows]
    tops = ["" if picture.column_dim is None else _shown(span) for span in panel.columns]
    widths = [max(len(tops[j]), *(len(row[j]) for row in labels)) for j in range(len(tops))]

    def rule(start: str, middle: str, end: str, head: str = "") -> str:
        return f"{head:>{left}} {start}{middle.join('─' * (width + 2) for width in widths)}{end}"

    def line(head: str, cells: list[str]) -> str:
        padded = (f" {cell:^{width}} " for cell, width in zip(cells, widths, strict=True))
        return f"{head:>{left}} │{'│'.join(padded)}│"

    lines = []
    if picture.column_dim is not None:
        spans = "   ".join(f"{top:^{width}}" for top, width in zip(tops, widths, strict=True))
        lines = [f"{'':>{left}}   {spans.rstrip()}   dim {picture.column_dim}"]
    lines = [*lines, rule("┌", "┬", "┐", corner)]
    for i, (head, cells) in enumerate(zip(heads, labels, strict=True)):
        lines = [*lines, *([rule("├", "┼", "┤")] if i else []), line(head, cells)]
    return [*lines, rule("└", "┴", "┘")]


def _shown(span: Span) -> str:
    return f"{span[0]}:{span[1]}"
