"""The parameters of a unit of which every rank keeps the whole, where they compute in another dtype than they are kept in."""

from __future__ import annotations

from collections.abc import Sequence

from hp_fsdp.buffer import FlatBuffer
from hp_fsdp.parameter import ManagedParameter
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor


class ReplicatedParameters:
    """Parameters of which every rank keeps the whole, and that compute in another dtype than they are kept in.

    (Where both are the same, the whole tensor is another face of the shard.) They are cast anew at every gather. Of offloaded ones
    each of ``rows`` travels to the device first.
    """

    def __init__(
        self,
        platform: Platform,
        params: Sequence[ManagedParameter],
        device: str,
        rows: Sequence[FlatBuffer] = (),
    ) -> None:
        self.platform = platform
        self.device = device
        self.rows = tuple(rows)
        self.params = [param for row in rows for param in row.params] if rows else list(params)
        for param in self.params:
            param.set_whole(platform.empty(param.shape, param.compute_dtype, device), is_alias=False)

    def fill(self) -> None:
        """Write the shards' present values. No communication."""
        if not self.params:
            return
        platform = self.platform
        fulls = [param.full for param in self.params]
        if self.rows:
            values = [
                platform.reshape(part, param.shape)
                for row in self.rows
                for param, part in zip(row.params, self._on_device(row), strict=True)
            ]
        else:
            values = [platform.detach(param.shard) for param in self.params]
        with platform.preserve_version(fulls):
            for full, value in zip(fulls, values, strict=True):
                platform.copy_(full, value)

    def _on_device(self, row: FlatBuffer) -> list[Tensor]:
        moved = self.platform.to_device(row.row(), self.device, non_blocking=True)
        return self.platform.split(moved, row.plan.sizes)
