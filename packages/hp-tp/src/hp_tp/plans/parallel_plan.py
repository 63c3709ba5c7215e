"""A plan of styles that can be printed and changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ParallelPlan(dict[str, Any]):
    """Patterns of module names -> styles, as :func:`hp_tp.parallelize_module` takes them: a dict that prints as a table.

    Change it as any dict before it is applied: ``plan["layers.*.mlp.down_proj"] = RowwiseParallel(...)``, ``del plan["lm_head"]``.

    Attributes:
        notes: pattern -> what the entry is for, and why a module has no better place.
        replicated: names of the modules whose parameters stay whole on every rank because they have no place in the plan, each
            with the reason. (Norms and routers, which belong there, are not among them.)
    """

    def __init__(
        self,
        entries: Mapping[str, Any],
        notes: Mapping[str, str] | None = None,
        replicated: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(entries)
        self.notes = dict(notes or {})
        self.replicated = dict(replicated or {})

    def __str__(self) -> str:
        rows = [("pattern", "style", "in -> out", "what it is")]
        for pattern, style in self.items():
            note = self.notes.get(pattern, "")
            rows.append((pattern or '""', type(style).__name__, described(style), note))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(line.rstrip() for line in lines)


def described(style: Any) -> str:
    """How what goes into a module and what comes out of it lie, as far as its style says so."""
    dim, layouts = getattr(style, "sequence_dim", None), getattr(style, "layouts", None)
    if dim is not None:
        text = f"Shard({dim}) -> Shard({dim})"
    elif layouts is not None:
        text = f"-> {layouts}"
    else:
        sides = [_shown(getattr(style, name, None)) for name in ("input_layouts", "output_layouts")]
        text = (
            " -> ".join(side for side in sides if side) if sides[0] else f"-> {sides[1]}" if sides[1] else ""
        )
    if text and getattr(style, "use_local_output", False):
        text = text + ", plain"
    return text


def _shown(layouts: Any) -> str:
    """A placement, or a tuple of them, without the parentheses of a single one."""
    if layouts is None:
        return ""
    if isinstance(layouts, tuple):
        return ", ".join(_shown(layout) or "None" for layout in layouts)
    return str(layouts)
