"""The flat row of this rank: all shards of one kind one after the other, as collectives want to read them."""

from __future__ import annotations

from collections.abc import Sequence

from hp_fsdp.layout import Slot, plan_rows
from hp_fsdp.offload import HostMemory
from hp_fsdp.parameter import ManagedParameter
from hp_platform.platform import Platform
from hp_platform.protocols.flat_shards import FlatRow
from hp_platform.protocols.tensor import DType, Tensor


class FlatBuffer:
    """Shards of one dtype that are trained, or that are not; or (``are_cut`` False) replicated parameters, whole.

    [Note: shards in the row] Where the platform can give part of a tensor a storage and a version count of its own, the
    shards *are* the row: an optimizer that writes to a shard writes to the row, and gathering copies nothing. The storage of
    its own makes a saved shard as large as the shard; the version count of its own lets shards be written independently.
    Where it cannot, every shard has memory of its own, and the row is put together when it is asked for.
    """

    def __init__(
        self,
        platform: Platform,
        params: Sequence[ManagedParameter],
        num_ranks: int,
        rank: int,
        device: str,
        *,
        shares_memory: bool,
        are_cut: bool = True,
        host: HostMemory | None = None,
    ) -> None:
        """Take over parameters that hold their shards of ``rank`` already (at least one, all of one dtype).

        ``device`` is where shards lie. ``shares_memory``: see [Note: shards in the row]; needs the capabilities
        ``write_into_view`` and ``alias``. A row is made when it is needed first, so that shards on the meta device are legal
        until then. ``host``: whose memory it is made of, if shards are offloaded.
        """
        self.platform = platform
        self.params = tuple(params)
        self.rank = rank
        self.device = device
        self.shares_memory = shares_memory
        self.host = host
        if are_cut:
            self.plan = plan_rows(
                [param.shape for param in params], num_ranks, [param.dim or 0 for param in params]
            )
            for param, slot in zip(self.params, self.plan.slots, strict=True):
                param.slot = slot
                param.own_shape, param.own_numel = slot.local_shape(rank), slot.local_numel(rank)
                param.is_padded = param.own_numel != slot.numel
        else:  # as if one rank had all of it
            self.rank = 0
            self.plan = plan_rows([param.shape or (1,) for param in params], 1)
        self.own_row: Tensor | None = None
        """Of which the shards are parts; None where they have memory of their own, and until it is needed."""
        self._addresses: list[int] = []
        self._flat_row: FlatRow | None = None
        if not self.on_meta():
            self.refresh()

    @property
    def dtype(self) -> DType:
        """Of the shards."""
        return self.params[0].dtype

    def on_meta(self) -> list[str]:
        """Names of the parameters whose shards have no memory yet."""
        platform = self.platform
        return [p.name for p in self.params if platform.device_of(p.shard).startswith("meta")]

    def refresh(self) -> None:
        """Look at what the shards are now; to be called before :meth:`row`.

        Somebody may have put other memory below a parameter (``p.data = x``): its values count, so they move in.
        RuntimeError if somebody has given a parameter another shape, dtype or device, or if one is on the meta device.
        """
        platform = self.platform
        if not self.shares_memory:
            for param in self.params:
                self._check(param)
            return
        if self.own_row is None:
            for param in self.params:
                self._check(param)
            self.own_row = self._new_row()
            self._addresses = self._expected_addresses()
        for param, slot, address in zip(self.params, self.plan.slots, self._addresses, strict=True):
            if address and platform.data_ptr(param.shard) != address:
                self._check(param)
                self._move_in(param, slot)

    def row(self) -> Tensor:
        """The shards' present values: 1-D, ``plan.numel`` elements, this rank's chunks with their padding. Read only."""
        if self.own_row is not None:
            return self.own_row
        platform, pieces = self.platform, []
        for param, slot in zip(self.params, self.plan.slots, strict=True):
            pieces.append(platform.reshape(platform.detach(param.shard), (-1,)))
            padding = slot.numel - slot.local_numel(self.rank)
            if padding:
                pieces.append(platform.zeros((padding,), self.dtype, self.device))
        return pieces[0] if len(pieces) == 1 else platform.cat(pieces)

    def flat_row(self) -> FlatRow | None:
        """The row for an optimizer, if the shards are parts of it; the same object while neither it nor a parameter is exchanged."""
        if self.own_row is None:
            return None
        parameters = tuple(param.parameter for param in self.params)
        known = self._flat_row
        if (
            known is None
            or known.row is not self.own_row
            or any(a is not b for a, b in zip(known.parameters, parameters, strict=True))
        ):
            known = FlatRow(self.own_row, parameters, tuple(slot.offset for slot in self.plan.slots))
            self._flat_row = known
        return known

    def _new_row(self) -> Tensor:
        if self.host is None:
            return self.platform.zeros((self.plan.numel,), self.dtype, self.device)
        row = self.host.empty(self.plan.numel, self.dtype)
        return self.platform.fill_(row, 0.0)

    def _expected_addresses(self) -> list[int]:
        """Where the shards begin; 0 for those without elements."""
        start, size = self.platform.data_ptr(self.own_row), self.platform.itemsize(self.dtype)
        return [start + slot.offset * size if slot.local_numel(self.rank) else 0 for slot in self.plan.slots]

    def _move_in(self, param: ManagedParameter, slot: Slot) -> None:
        platform = self.platform
        part = platform.narrow(self.own_row, 0, slot.offset, slot.local_numel(self.rank))
        with platform.no_grad():
            platform.copy_(part, platform.reshape(platform.detach(param.shard), (-1,)))
        platform.set_data_(param.shard, platform.reshape(platform.alias(part), param.local_shape(self.rank)))

    def _check(self, param: ManagedParameter) -> None:
        present, expected = param.shard, param.local_shape(self.rank)
        device = self.platform.device_of(present)
        if device.startswith("meta"):
            raise RuntimeError(
                f"parameter {param.name!r} is on the meta device and has no values: after fully_shard call "
                "model.to_empty(device=...) and initialise, or load a state dict, before the first forward"
            )
        if tuple(present.shape) != expected or present.dtype != param.dtype or device != self.device:
            raise RuntimeError(
                f"the shard of parameter {param.name!r} was changed after fully_shard: it is {tuple(present.shape)} "
                f"{present.dtype} on {device}, and must be {expected} {param.dtype} on {self.device}; change dtype and "
                "device before fully_shard, and load values with set_model_state_dict"
            )
