"""``show``: who holds what."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hp_dtensor.dtensor import DTensorMethods
from hp_dtensor.picture.blocks import picture_of
from hp_dtensor.picture.figure import save_figure
from hp_dtensor.picture.text import as_text
from hp_dtensor.spec import resolve, shown


def show(
    x: Any,
    placements: Sequence[Any] | None = None,
    *,
    shape: Sequence[int] | None = None,
    path: str | os.PathLike[str] | None = None,
) -> str:
    """Which rank holds which block, as text; with ``path`` as a drawing in that file, too.

    ::

        >>> print(show(mesh, [Shard(0), Shard(1)], shape=(6, 8)))
        (6, 8) as (Shard(0), Shard(1)) on DeviceMesh('cpu', dp=2, tp=2, ranks 0..3)
                0:4   4:8   dim 1
        dim 0 ┌─────┬─────┐
          0:3 │  0  │  1  │
              ├─────┼─────┤
          3:6 │  2  │  3  │
              └─────┴─────┘

    ``0, 1`` in a block: both ranks hold a copy of it. ``0 + 1``: the values of both make it up (Partial). Of tensors with
    more than two dims, the first two that are cut are drawn, once for every block along the others.

    Args:
        x: a DTensor, or a Layout of a tensor, or a DeviceMesh.
        placements: one per mesh dim, where ``x`` is a mesh.
        shape: the global shape, where ``x`` is no DTensor.
        path: of an .svg, .png or .pdf file to write; needs matplotlib (``hp-dtensor[plot]``).

    Communication: none; any rank may call. ValueError if something is missing or does not fit, ImportError without matplotlib.
    """
    if isinstance(x, DTensorMethods):
        if placements is not None or shape is not None:
            raise ValueError("show(dtensor) takes neither placements nor shape: the DTensor has them")
        mesh, shape, given = x._spec.mesh, x._spec.shape, x._spec.placements
    else:
        if shape is None:
            raise ValueError(f"show of a {type(x).__name__} needs shape=, the global shape of the tensor")
        mesh = getattr(x, "mesh", x) if placements is None else x
        if placements is None and not hasattr(x, "placements"):
            raise ValueError(
                f"show takes a DTensor, a Layout with shape=, or a mesh with placements and shape=; got {type(x).__name__}"
            )
        given = resolve(mesh, x.placements if placements is None else placements, len(shape))
    shape = tuple(shape)
    picture = picture_of(mesh, given, shape, f"{shape} as {shown(given)} on {mesh}")
    if path is not None:
        save_figure(picture, Path(path))
    return as_text(picture)
