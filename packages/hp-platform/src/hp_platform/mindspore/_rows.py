"""Passes over memory that runtimes make beside products, in MindSpore: one operation after the other."""

from __future__ import annotations

from collections.abc import Sequence

import mindspore
from mindspore import mint

from hp_platform.mindspore._tensor import MindSporeTensorOps


class MindSporeRowOps(MindSporeTensorOps):
    """A part of :class:`hp_platform.protocols.TensorOps`."""

    def foreach_copy_both_(
        self,
        xs: Sequence[mindspore.Tensor],
        ys: Sequence[mindspore.Tensor],
        values: Sequence[mindspore.Tensor],
    ) -> None:
        """Write each value to two places."""
        self.foreach_copy_(xs, values)
        self.foreach_copy_(ys, values)

    def reduce_rows_(
        self,
        x: mindspore.Tensor,
        rows: mindspore.Tensor,
        op: str,
        own: mindspore.Tensor | None = None,
        at: int = 0,
    ) -> mindspore.Tensor:
        """Sum or mean of rows."""
        wide = rows.astype(x.dtype)
        if own is not None:
            wide = mint.cat((wide[:at], own.astype(x.dtype).reshape((1, -1)), wide[at + 1 :]))
        total = mint.sum(wide, 0)
        return self.copy_(x, total / rows.shape[0] if op == "mean" else total)
