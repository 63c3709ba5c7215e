"""Communication: the launches a backend has, raw.

Raw means: contiguous whole tensors in, a given output buffer filled, groups of more than one rank, reduce operations and
dtypes that the backend says it can. Everything a user sees stands once above this, in :mod:`hp_platform.collectives`:
allocation, size-1 groups, non-contiguous inputs, mean, bool, recording, time-outs, coalescing by copy, objects, adjoints.

``group`` is the backend's own handle (:attr:`hp_platform.ProcessGroup.native`). Peers are global ranks. With
``async_op=False`` the result is ready (on the current stream) when the function returns, and it returns None; else it
returns a :class:`NativeWork`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeAlias

from hp_platform.protocols.peer import PeerMemory
from hp_platform.protocols.tensor import DType, Tensor

NativeGroup: TypeAlias = Any
P2P: TypeAlias = tuple[Literal["send", "recv"], Tensor, int]
"""Kind, whole contiguous tensor, global rank of the peer."""


class NativeWork(Protocol):
    """A launch that is under way."""

    def wait(self) -> None:
        """The output is ready for what the current stream does next. Raises what the backend reports (time-out, lost peer)."""
        ...

    def is_completed(self) -> bool:
        """Whether waiting would return at once; True after :meth:`wait`. A backend that cannot tell earlier (gloo's sends and
        receives) says False until then, so that this is for measuring, not for waiting in a loop.
        """
        ...


class CommOps(Protocol):
    """Raw primitives of communication."""

    # --- world and groups
    def create_world(
        self,
        *,
        backend: str | None,
        device_type: str,
        rank: int,
        world_size: int,
        timeout: timedelta,
        init_method: str | None,
        store: Any,
        device_id: Any,
        options: Any,
    ) -> tuple[NativeGroup, str, Any]:
        """Join all processes. Returns (group, backend's name, key-value store that all ranks share or None)."""
        ...

    def adopt_world(self) -> tuple[NativeGroup, str, Any] | None:
        """The same for a world that the user has initialised through the framework itself; None if there is none."""
        ...

    def native_ranks(self, group: NativeGroup) -> tuple[int, ...]:
        """Global ranks of a group that the framework or the user made."""
        ...

    def native_timeout(self, group: NativeGroup) -> timedelta | None:
        """How long such a group waits, the shortest of its backends' times; None where the framework does not tell."""
        ...

    def native_rank(self, group: NativeGroup) -> int:
        """This process' position in such a group."""
        ...

    def new_group(self, ranks: Sequence[int], timeout: timedelta, backend: str | None = None) -> NativeGroup:
        """A group of sorted global ranks. Only its members call, all of them in the same order."""
        ...

    def destroy_group(self, group: NativeGroup | None) -> None:
        """Free one group; None: the world, with everything in it."""
        ...

    # --- in compiled code: a part of what is recorded, new tensors out, sums only, no time-outs and no records
    def traced_name(self, group: NativeGroup) -> str:
        """What the following call the group by; asked outside of compiled code. NotImplementedError unless ``supports("traced_collectives")``."""
        ...

    def traced_all_reduce(self, x: Tensor, group: str) -> Tensor:
        """The sum over the ranks."""
        ...

    def traced_all_gather(self, x: Tensor, size: int, group: str) -> Tensor:
        """``(n, ...)`` -> ``(size * n, ...)``, of a group of ``size`` ranks."""
        ...

    def traced_reduce_scatter(self, x: Tensor, size: int, group: str) -> Tensor:
        """``(size * n, ...)`` -> this rank's ``(n, ...)`` of the sum."""
        ...

    def has_threads_with_tensors(self, backend: str) -> bool:
        """Whether groups of this backend must be ended before the interpreter is, since threads of theirs drop tensors."""
        ...

    def is_timeout(self, error: BaseException) -> bool:
        """Whether this exception of a launch or wait means that a peer did not come in time or is gone."""
        ...

    # --- the shared key-value store (small, slow, no device): what diagnosis and rendezvous need
    def store_set(self, store: Any, key: str, value: bytes) -> None:
        """Publish."""
        ...

    def store_get(self, store: Any, key: str) -> bytes | None:
        """Read without waiting; None if nobody has published."""
        ...

    # --- what the backend can do for tensors of a device ("cpu", "cuda", "npu")
    def native_reduce_ops(self, device_type: str) -> frozenset[str]:
        """Of ``{"sum", "mean", "max", "min", "prod"}`` those that reductions do by themselves and rightly for floats."""
        ...

    def can_reduce(self, dtype: DType, device_type: str) -> bool:
        """Whether tensors of this dtype can be reduced at all (HCCL has no float64)."""
        ...

    def can_coalesce(self, device_type: str) -> bool:
        """Whether the ``*_coalesced`` launches exist for tensors of this device."""
        ...

    def can_exchange_lists(self, device_type: str) -> bool:
        """Whether there is :meth:`all_to_all_coalesced_into` for tensors of this device."""
        ...

    # --- collectives
    def all_reduce_(self, x: Tensor, op: str, group: NativeGroup, async_op: bool) -> NativeWork | None:
        """``x`` becomes the reduction over ranks."""
        ...

    def all_gather_into(
        self, out: Tensor, x: Tensor, group: NativeGroup, async_op: bool
    ) -> NativeWork | None:
        """``out`` (ranks * n, ...) becomes the ranks' ``x`` (n, ...) one after the other."""
        ...

    def all_gather_uneven_into(
        self, outs: Sequence[Tensor], x: Tensor, group: NativeGroup, async_op: bool
    ) -> NativeWork | None:
        """``outs[r]`` becomes rank r's ``x``; the sizes of dim 0 may differ and be 0."""
        ...

    def reduce_scatter_into(
        self, out: Tensor, x: Tensor, op: str, group: NativeGroup, async_op: bool
    ) -> NativeWork | None:
        """``out`` (n, ...) becomes this rank's block of the reduction of ``x`` (ranks * n, ...)."""
        ...

    def reduce_scatter_uneven_into(
        self, out: Tensor, xs: Sequence[Tensor], op: str, group: NativeGroup, async_op: bool
    ) -> NativeWork | None:
        """``out`` becomes the reduction over ranks of their ``xs[this rank]``; the sizes of dim 0 may differ and be 0."""
        ...

    def all_to_all_into(
        self,
        out: Tensor,
        x: Tensor,
        out_sizes: Sequence[int],
        in_sizes: Sequence[int],
        group: NativeGroup,
        async_op: bool,
    ) -> NativeWork | None:
        """Blocks of dim 0: ``in_sizes[r]`` rows go to rank r, ``out_sizes[r]`` rows come from it; 0 is allowed."""
        ...

    def broadcast_(self, x: Tensor, src: int, group: NativeGroup, async_op: bool) -> NativeWork | None:
        """``x`` becomes that of rank ``src``."""
        ...

    def scatter_into(
        self, out: Tensor, xs: Sequence[Tensor] | None, src: int, group: NativeGroup, async_op: bool
    ) -> NativeWork | None:
        """``out`` becomes ``xs[this rank]`` of rank ``src``; equal shapes; ``xs`` None elsewhere."""
        ...

    def gather_into(
        self, outs: Sequence[Tensor] | None, x: Tensor, dst: int, group: NativeGroup, async_op: bool
    ) -> NativeWork | None:
        """On rank ``dst`` ``outs[r]`` becomes rank r's ``x``; equal shapes; ``outs`` None elsewhere."""
        ...

    def send(self, x: Tensor, dst: int, group: NativeGroup, async_op: bool) -> NativeWork | None:
        """To one peer; matched in order."""
        ...

    def recv_(self, x: Tensor, src: int, group: NativeGroup, async_op: bool) -> NativeWork | None:
        """From one peer."""
        ...

    def batch_p2p(self, ops: Sequence[P2P], group: NativeGroup) -> Sequence[NativeWork]:
        """Start all at once, in no order that could block."""
        ...

    def barrier(self, group: NativeGroup, async_op: bool) -> NativeWork | None:
        """Return when all ranks have come."""
        ...

    def peer_domain(self, device: str) -> str | None:
        """A name for the devices that may reach each other's memory: those of equal names. None: this one reaches no other."""
        ...

    def peer_memory(
        self, numel: int, dtype: DType, device: str, group: NativeGroup, timeout: timedelta
    ) -> PeerMemory:
        """This rank's part of new memory for the group, which the ranks then join
        (:class:`~hp_platform.protocols.peer.PeerMemory`). RuntimeError where there is none. Needs ``supports("peer_memory")``.
        """
        ...

    # --- coalesced: several collectives of one kind in one launch
    def all_reduce_coalesced_(
        self, xs: Sequence[Tensor], op: str, group: NativeGroup, async_op: bool
    ) -> NativeWork | None:
        """:meth:`all_reduce_` of each."""
        ...

    def all_gather_coalesced_into(
        self, outs: Sequence[Tensor], xs: Sequence[Tensor], group: NativeGroup, async_op: bool
    ) -> NativeWork | None:
        """:meth:`all_gather_into` of pairs."""
        ...

    def reduce_scatter_coalesced_into(
        self, outs: Sequence[Tensor], xs: Sequence[Tensor], op: str, group: NativeGroup, async_op: bool
    ) -> NativeWork | None:
        """:meth:`reduce_scatter_into` of pairs."""
        ...

    def all_to_all_coalesced_into(
        self,
        outs: Sequence[Sequence[Tensor]],
        xs: Sequence[Sequence[Tensor]],
        group: NativeGroup,
        async_op: bool,
    ) -> NativeWork | None:
        """Several exchanges: ``outs[i][r]`` becomes rank r's ``xs[i][own rank]``."""
        ...
