"""Passes over memory that runtimes make beside products, in PyTorch: each number is read once where a device has kernels for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hp_platform.torch._versions import count_writes, version_before
from hp_platform.torch.device import TorchDevice


class TorchRowOps:
    """A part of :class:`hp_platform.protocols.TensorOps`."""

    _devices: dict[str, TorchDevice]

    def foreach_copy_both_(
        self, xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> None:
        """Write each value to two places."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.foreach_copy_both_(xs, ys, values)
            return
        left = list(zip(xs, ys, values, strict=True))
        kernels = self._devices[left[0][0].device.type].fused_rows() if left else None
        if kernels is not None:
            left = [each for each in left if not kernels.copy_both(*each)]
        if left:
            firsts, seconds, given = zip(*left, strict=True)
            targets = [*firsts, *seconds]
            before = version_before(targets)
            torch._foreach_copy_(targets, [*given, *given])
            count_writes(targets, before)

    def reduce_rows_(
        self, x: torch.Tensor, rows: torch.Tensor, op: str, own: torch.Tensor | None = None, at: int = 0
    ) -> torch.Tensor:
        """Sum or mean of rows."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.reduce_rows_(x, rows, op, own, at)
        kernels = self._devices[x.device.type].fused_rows()
        if kernels is not None and kernels.reduce(x, rows, op, own, at):
            return x
        if own is not None:
            rows[at].copy_(own)
        return _OF_ROWS[op](rows, 0, dtype=x.dtype, out=x)


_OF_ROWS: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.sum, "mean": torch.mean}
