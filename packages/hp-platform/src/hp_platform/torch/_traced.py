"""Collectives in what dynamo records: operators with values in and out, which inductor orders and overlaps."""

from __future__ import annotations

from typing import Any

import torch

# Registered when torch.distributed is imported; asked for by name in every call, so that dynamo sees an operator.
_ops = torch.ops._c10d_functional


class TorchTracedOps:
    """Implements the traced collectives of :class:`hp_platform.protocols.CommOps`."""

    def traced_name(self, group: Any) -> str:
        """The name that c10d keeps the group by."""
        return str(group.group_name)

    def traced_all_reduce(self, x: torch.Tensor, group: str) -> torch.Tensor:
        """Sum."""
        return _arrived(_ops.all_reduce(x.contiguous(), "sum", group))

    def traced_all_gather(self, x: torch.Tensor, size: int, group: str) -> torch.Tensor:
        """Along dim 0."""
        return _arrived(_ops.all_gather_into_tensor(x.contiguous(), size, group))

    def traced_reduce_scatter(self, x: torch.Tensor, size: int, group: str) -> torch.Tensor:
        """Along dim 0."""
        return _arrived(_ops.reduce_scatter_tensor(x.contiguous(), "sum", size, group))


def _arrived(x: torch.Tensor) -> torch.Tensor:
    """The result, waited for. A view of it: with torch 2.11, graphs that run uncompiled (backend="eager") lose gradients behind a
    Function that gives the very tensor that was waited for.
    """
    x = _ops.wait_tensor(x)
    return x.view(x.shape)
