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
        return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group))

    def traced_all_gather(self, x: torch.Tensor, size: int, group: str) -> torch.Tensor:
        """Along dim 0."""
        return _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), size, group))

    def traced_reduce_scatter(self, x: torch.Tensor, size: int, group: str) -> torch.Tensor:
        """Along dim 0."""
        return _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous(), "sum", size, group))
