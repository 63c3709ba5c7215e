"""How the parameters of a unit lie: in rows while they are shards, in storages while they are whole, in lines when reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hp_fsdp.buffer import FlatBuffer
from hp_fsdp.extension import ExtendedWhole
from hp_fsdp.layout import plan_rows
from hp_fsdp.lines import Lines
from hp_fsdp.offload import HOST, HostMemory, check_on_host
from hp_fsdp.parameter import ManagedParameter
from hp_fsdp.peers import Peers
from hp_fsdp.places import Places
from hp_fsdp.replicated import ReplicatedParameters
from hp_fsdp.whole import WholeParameters
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor

if TYPE_CHECKING:
    from hp_fsdp.options import Options


class Arrangement:
    """Made anew whenever the unit gets or loses a parameter."""

    def __init__(
        self, platform: Platform, params: Sequence[ManagedParameter], places: Places, options: Options
    ) -> None:
        self.platform = platform
        self.params = tuple(params)
        self.places = places
        self.options = options
        self.host = host_memory(platform, places, options)
        self.shard_device = places.device if self.host is None else HOST
        self._lines: dict[tuple[bool, ...], list[Lines]] = {}
        precision = options.precision
        for param in params:
            param.compute_dtype = precision.compute_dtype(param.dtype)
            param.reduce_dtype = precision.reduction_dtype(param.dtype)
            param.gathers_summands = param.stays and options.is_fused
            param.has_wide_gradient = (
                precision.wide_weight_grads and param.reduce_dtype != param.compute_dtype
            )
        self.buffers = self._make_buffers([param for param in params if param.dim is not None])
        self.aliases: list[ManagedParameter] = []
        self.replicated_rows: list[FlatBuffer] = []
        self.replicated = ReplicatedParameters(platform, [], places.device, [])
        self.wholes: list[WholeParameters | ExtendedWhole] = []
        # They take memory when they are made: not before there are values.
        self._addresses: list[int] | None = None
        """Where all shards lay, and the whole tensors that are other faces of them, when they were looked at; None: that does not
        tell enough, or has not been done.
        """
        self._has_whole = not self.on_meta()
        if self._has_whole:
            self._make_whole()

    def cut(self, param: ManagedParameter) -> None:
        """Reduce a parameter to this rank's chunk."""
        slot = None
        if param.dim is not None:
            slot = plan_rows([param.shape], self.places.num_shards, [param.dim]).slots[0]
        param.slot = slot
        param.cut(slot, self.places, self.shard_device)

    def _make_buffers(self, params: Sequence[ManagedParameter], *, are_cut: bool = True) -> list[FlatBuffer]:
        platform, places, options = self.platform, self.places, self.options
        kinds: dict[tuple[Any, bool, int], list[ManagedParameter]] = {}
        for number, param in enumerate(params, 1):
            kinds.setdefault((param.dtype, param.trains, number if param.is_extended else 0), []).append(
                param
            )
        shares = options.zero_copy is not False and can_share(platform, self.shard_device)
        return [
            FlatBuffer(
                platform,
                kind,
                places.num_shards,
                places.shard_rank,
                self.shard_device,
                shares_memory=shares and not kind[0].is_extended,
                are_cut=are_cut,
                host=self.host,
            )
            for kind in kinds.values()
        ]

    def _make_whole(self) -> None:
        platform, places, options = self.platform, self.places, self.options
        self.aliases = [param for param in self.params if self.is_alias(param)]
        for param in self.aliases:
            param.set_whole(platform.detach(param.shard), is_alias=True)
        casts = [param for param in self.params if param.dim is None and not self.is_alias(param)]
        self.replicated_rows = [] if self.host is None else self._make_buffers(casts, are_cut=False)
        self.replicated = ReplicatedParameters(platform, casts, places.device, self.replicated_rows)
        together: dict[Any, list[FlatBuffer]] = {}
        for buffer in self.buffers:
            if not self.is_alias(buffer.params[0]) and not buffer.params[0].is_extended:
                together.setdefault(buffer.params[0].compute_dtype, []).append(buffer)
        self.wholes = [
            WholeParameters(platform, buffers, dtype, places, is_fused=options.is_fused)
            for dtype, buffers in together.items()
        ]
        extended = [param for param in self.params if param.is_extended]
        self.wholes.extend(ExtendedWhole(platform, param, places) for param in extended)

    def is_alias(self, param: ManagedParameter) -> bool:
        """See [Note: whole without a copy]."""
        if param.is_extended:
            return False
        is_whole = param.dim is None or self.places.num_shards == 1
        return is_whole and param.compute_dtype == param.dtype and self.host is None

    # --- the shards as they are
    def on_meta(self) -> list[str]:
        """Names of parameters without values."""
        return [p.name for p in self.params if self.platform.device_of(p.shard).startswith("meta")]

    def stand(self, shards: Sequence[Tensor]) -> bool:
        """Whether the ``shards`` of all parameters lie where they lay at the last :meth:`refresh`, and all is well with them."""
        return self._addresses is not None and self._addresses == self._addresses_of(shards)

    def _addresses_of(self, shards: Sequence[Tensor]) -> list[int]:
        return list(map(self.platform.data_ptr, [*shards, *(param.full for param in self.aliases)]))

    def refresh(self) -> None:
        """See :meth:`FlatBuffer.refresh`. RuntimeError for offloaded shards that are on the host no more."""
        if self.host is not None:
            check_on_host(self.platform, self.params)
        if not self._has_whole and not self.on_meta():
            self._make_whole()
            self._has_whole = True
        for buffer in (*self.buffers, *self.replicated_rows):
            buffer.refresh()
        for param in self.aliases:
            param.follow_shard()
        if self._has_whole and self.host is None and all(buffer.shares_memory for buffer in self.buffers):
            self._addresses = self._addresses_of([param.shard for param in self.params])

    # --- the whole parameters
    def allocate(self) -> None:
        """Get memory for them."""
        for whole in self.wholes:
            whole.allocate()

    def free(self) -> None:
        """Give it back."""
        for whole in self.wholes:
            whole.free()

    def launch(self, async_op: bool, peers: Peers | None) -> Callable[[], None]:
        """Begin to fill them; what has to follow. See :meth:`WholeParameters.launch`."""
        if self.replicated.params:
            self.replicated.fill()
        if len(self.wholes) == 1:
            return self.wholes[0].launch(async_op, peers)
        follows = [whole.launch(async_op, peers) for whole in self.wholes]

        def follow() -> None:
            for each in follows:
                each()

        return follow

    # --- their gradients
    def lines(self, trains: tuple[bool, ...]) -> list[Lines]:
        """One layout per dtype in which gradients are reduced, of the parameters that train."""
        found = self._lines.get(trains)
        if found is None:
            groups: dict[Any, list[ManagedParameter]] = {}
            # In the order of the buffers: gradients of a buffer lie as its shards do.
            ordered = [p for buffer in self.buffers for p in buffer.params]
            ordered = [*ordered, *(p for p in self.params if p.slot is None)]
            training = {id(param) for param, flag in zip(self.params, trains, strict=True) if flag}
            for param in ordered:
                if id(param) in training:
                    groups.setdefault(param.reduce_dtype, []).append(param)
            places = self.places
            found = [
                Lines(self.platform, group, dtype, places.num_shards, places.device)
                for dtype, group in groups.items()
            ]
            self._lines[trains] = found
        return found


def host_memory(platform: Platform, places: Places, options: Options) -> HostMemory | None:
    """Where shards lie that are offloaded; None: they are not."""
    return HostMemory(platform, places, pin=options.pin_memory) if options.offload else None


def can_share(platform: Platform, device: str) -> bool:
    """Whether shards can be parts of a row; see [Note: shards in the row]."""
    return platform.supports("write_into_view", device) and platform.supports("alias", device)
