"""A routing as text, one row for all parameters of numbered layers that go the same way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

_HEAD = ("parameter", "number", "shape", "placements", "optimizer", "why")


class Row(Protocol):
    """One parameter of the table: a :class:`hp_optim.chain.routing.Route`."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def placements(self) -> str: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def why(self) -> str: ...


def table_of(rows: Iterable[Row]) -> str:
    """Columns parted by two spaces, under a line of dashes."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        name = ".".join("*" if part.isdigit() else part for part in row.name.split("."))
        shape = "x".join(map(str, row.shape)) or "scalar"
        key = (name, shape, row.placements or "whole", row.optimizer or "none", row.why)
        alike.setdefault(key, []).append(row.name)
    lines: list[tuple[str, ...]] = [_HEAD]
    for (name, *rest), names in alike.items():
        lines.append((names[0] if len(names) == 1 else name, str(len(names)), *rest))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)
