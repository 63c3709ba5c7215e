"""The flat row of this rank: all shards of one kind one after the other, as collectives want to read them."""

from __future__ import annotations

from collections.abc import Sequence

from hp_fsdp.layout import plan_rows
from hp_fsdp.parameter import ManagedParameter
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import DType, Tensor


class FlatBuffer:
    """Shards of one dtype that are trained, or that are not.

    [Note: shards in the row] Where the platform can give part of a tensor a storage and a version count of its own, the
    shards *are* the row: an optimizer that writes to a shard writes to the row, and gathering copies nothing. The storage of
    its own makes a saved shard as large as the shard; the version count of its own lets shards be written independently.
    Where it cannot, every shard has memory of its own, and the row is put together when it is asked for.
    """

    def __init__(
        self, platform: Platform, params: Sequence[ManagedParameter], num_ranks: int, rank: int, device: str
    ) -> None:
        """Take over parameters that hold their shards of ``rank`` already (at least one, all of one dtype)."""
        self.platform = platform
        self.params = tuple(params)
        self.rank = rank
        self.device = device
        self.plan = plan_rows([param.shape for param in params], num_ranks)
        for param, slot in zip(self.params, self.plan.slots, strict=True):
            param.slot = slot
        self._row: Tensor | None = None
        if platform.supports("write_into_view", device) and platform.supports("alias", device):
            self._row = platform.zeros((self.plan.numel,), self.dtype, device)
            self._address = platform.data_ptr(self._row)
            for param in self.params:
                self._move_in(param)

    @property
    def dtype(self) -> DType:
        """Of the shards."""
        return self.params[0].dtype

    def row(self) -> Tensor:
        """The shards' present values: 1-D, ``plan.numel`` elements, this rank's chunks with their padding. Read only.

        RuntimeError if somebody has given a parameter another shape, dtype or device since.
        """
        for param in self.params:
            self._check(param)
        if self._row is not None:
            for param in self.params:
                # Somebody may have put other memory below the parameter (p.data = x): its values count, so they move in.
                if self._left(param):
                    self._move_in(param)
            return self._row
        platform, pieces = self.platform, []
        for param in self.params:
            assert param.slot is not None
            pieces.append(platform.reshape(platform.detach(param.shard), (-1,)))
            padding = param.slot.numel - param.slot.local_numel(self.rank)
            if padding:
                pieces.append(platform.zeros((padding,), self.dtype, self.device))
        return platform.cat(pieces)

    def _move_in(self, param: ManagedParameter) -> None:
        platform, slot = self.platform, param.slot
        assert slot is not None
        part = platform.narrow(self._row, 0, slot.offset, slot.local_numel(self.rank))
        platform.copy_(part, platform.reshape(platform.detach(param.shard), (-1,)))
        platform.set_data_(
            param.shard, platform.reshape(platform.alias(part), slot.local_shape(self.rank))
        )

    def _left(self, param: ManagedParameter) -> bool:
        slot = param.slot
        assert slot is not None
        if not slot.local_numel(self.rank):
            return False
        expected = self._address + slot.offset * self.platform.itemsize(self.dtype)
        return self.platform.data_ptr(param.shard) != expected

    def _check(self, param: ManagedParameter) -> None:
        present, expected = param.shard, param.local_shape(self.rank)
        device = self.platform.device_of(present)
        if tuple(present.shape) != expected or present.dtype != param.dtype or device != self.device:
            raise RuntimeError(
                f"the shard of parameter {param.name!r} was changed after fully_shard: it is {tuple(present.shape)} "
                f"{present.dtype} on {device}, and must be {expected} {param.dtype} on {self.device}; change dtype and "
                "device before fully_shard, and load values with set_model_state_dict"
            )
