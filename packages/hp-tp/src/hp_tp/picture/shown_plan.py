"""``show_plan``: what a plan does, as text and as a drawing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hp_platform import get_platform
from hp_tp.picture.drawing import drawing
from hp_tp.picture.stages import Stage, Way, stages_of


def show_plan(
    module: Any,
    plan: Mapping[str, Any],
    *,
    num_ranks: int = 4,
    path: str | os.PathLike[str] | None = None,
) -> str:
    """What a plan does at every door, as text; with ``path`` as a drawing, too.

    One row per entry of the plan, in the order of the model, in the form ``activation x weight = activation``: how the input
    comes and what travels to bring it where it is used, how the weight is cut, what comes out, and what travels to hand it out.
    In brackets what travels in backward. ``the same``: the module in front has brought this input along already.
    Activations are taken for (batch, tokens, features).

    Args:
        module: the model that the plan is for, before the plan is applied; it may be on the meta device.
        plan: patterns of module names -> styles, as :func:`parallelize_module` takes it or :func:`plan_for` gives it. Entries
            of styles that neither cut a module over one mesh dim nor move its input are left out.
        num_ranks: of the drawing; it need not be that of a mesh.
        path: of an .svg file to write. Equal plans make equal files.

    Communication: none; any process may call. ValueError for another kind of file, fewer than one rank, a pattern that meets no
    module, and a plan of which nothing can be drawn; TypeError for what is no module.
    """
    if path is not None and Path(path).suffix.lower() != ".svg":
        raise ValueError(f"a plan is drawn into a file with suffix .svg, got {str(path)!r}")
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
        raise ValueError(f"num_ranks is a number of ranks, 1 or more, got {num_ranks!r}")
    if not get_platform().is_module(module):
        raise TypeError(f"show_plan takes the module that the plan is for, got a {type(module).__name__}")
    stages = stages_of(module, plan, num_ranks)
    if path is not None:
        Path(path).write_text(drawing(stages, num_ranks), encoding="utf-8")
    return _text(stages)


def _text(stages: Sequence[Stage]) -> str:
    rows = [("module", "comes as", "travels", "used as", "weight", "gives", "travels", "leaves as")]
    for stage in stages:
        weight = "" if stage.weight is None else stage.weight.cut or "whole"
        ends = (stage.gives or "", _way(stage.behind), stage.leaves or "")
        rows.append((stage.name, stage.comes, _way(stage.in_front), stage.used, weight, *ends))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _way(way: Way) -> str:
    return f"{way.forward} [{way.backward}]".strip() if way.backward else way.forward
