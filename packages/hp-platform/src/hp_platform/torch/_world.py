"""The world, its groups and its store: torch.distributed's process groups."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hp_platform import launch
from hp_platform.torch.device import TorchDevice

_LOST_PEER = re.compile(
    r"time[d ]?-?\s?out|connection (was |is )?(likely )?(closed|reset|refused|aborted|lost)|closed by (remote )?peer|"
    r"broken pipe|socket closed|pair closure|failed to (recv|connect|send)|remote process exited|"
    r"communicator (was|has been) aborted|nccl ?remoteerror|hcclgetcommasyncerror|\bEI000[26]\b",
    re.IGNORECASE,
)
"""What gloo, NCCL, HCCL and the TCP store write when a peer does not come or is gone."""


class TorchWorldOps:
    """Implements the part of :class:`hp_platform.protocols.CommOps` that makes and ends groups."""

    def __init__(self, devices: dict[str, TorchDevice]) -> None:
        self._devices = devices
        self._servers: dict[tuple[str, int], Any] = {}
        self._num_worlds: Counter[tuple[str, int]] = Counter()
        self._num_groups: Counter[tuple[int, ...]] = Counter()

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
    ) -> tuple[Any, str, Any]:
        """Join all ranks.

        The ranks meet at ``store``, else at ``init_method``, else at a TCP store of rank 0 on MASTER_ADDR:MASTER_PORT (under
        torchrun, which runs that store itself, through torch's own ``env://``). RuntimeError where none of them is given.
        """
        handle = self._devices[device_type]
        backend = backend or handle.world_backend
        if store is None and init_method is None:
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                init_method = "env://"
            else:
                store = self._meet(rank, world_size, timeout)
        if device_id is not None:
            # [Note: no bound device] torch would bind the world to this device and make every later NCCL group by a split
            # in which all ranks must take part; ours are made by their members alone. Communicators are made at first use.
            handle.set_current(torch.device(device_id).index or 0)
        dist.init_process_group(
            backend,
            init_method=init_method,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            pg_options=options,
        )
        return dist.group.WORLD, backend, dist.distributed_c10d._get_default_store()

    def _meet(self, rank: int, world_size: int, timeout: timedelta) -> Any:
        """The store of the next world: one server per address for the life of the process, with keys of its own for each world.

        A new server for every world would race: a quick rank would reach the server of the world that is being ended.
        """
        if world_size == 1:
            return dist.HashStore()  # nobody to meet: no port is needed
        place = launch.environment()
        if place is None and not ("MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ):
            raise RuntimeError(
                f"rank {rank} of {world_size} does not know where to meet the others: set MASTER_ADDR and MASTER_PORT "
                "(torchrun, msrun and hp_platform.launch.spawn do), or pass init_method or store"
            )
        address = (
            (place.master_addr, place.master_port)
            if place is not None
            else (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        )
        if address not in self._servers:
            self._servers[address] = dist.TCPStore(*address, world_size, is_master=rank == 0, timeout=timeout)
        self._num_worlds[address] += 1
        return dist.PrefixStore(f"world{self._num_worlds[address]}", self._servers[address])

    def adopt_world(self) -> tuple[Any, str, Any] | None:
        """The world that the user made with torch.distributed, if any."""
        if not dist.is_initialized():
            return None
        world = dist.group.WORLD
        name = dist.get_backend(world)
        if name not in ("gloo", "nccl", "hccl"):
            name = dist.get_backend_config(world)
        return world, name, dist.distributed_c10d._get_default_store()

    def native_ranks(self, group: Any) -> tuple[int, ...]:
        """Global ranks in the group's order."""
        return tuple(dist.get_process_group_ranks(group))

    def native_timeout(self, group: Any) -> timedelta | None:
        """As the backends' options say."""
        backends = [group._get_backend(device) for device in group._device_types]
        found = [getattr(getattr(each, "options", None), "_timeout", None) for each in backends]
        return min((each for each in found if isinstance(each, timedelta)), default=None)

    def native_rank(self, group: Any) -> int:
        """Position of this process in the group."""
        return group.rank()

    def new_group(self, ranks: Sequence[int], timeout: timedelta, backend: str | None = None) -> Any:
        """A group made by its members alone.

        [Note: names of groups] The members meet under the group's name. torch.distributed.new_group makes one of the ranks
        and the *number of groups that this process has*, which differs between ranks that belong to different groups (they
        would wait for each other in vain), and which repeats after a destroy (they would find the dead group's addresses).
        So the name is made here: of the ranks, and of how often just these ranks have made a group, which all of them know.
        """
        key = tuple(ranks)
        self._num_groups[key] += 1
        name = f"hp:{'_'.join(map(str, key))}:{self._num_groups[key]}"
        world = dist.group.WORLD
        backend = backend or dist.get_backend_config(world)
        group, _ = dist.distributed_c10d._new_process_group_helper(
            len(key),
            key.index(dist.get_rank()),
            list(key),
            backend,
            dist.distributed_c10d._get_default_store(),
            name,
            timeout=timeout,
        )
        dist.distributed_c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(key)}
        return group

    def destroy_group(self, group: Any) -> None:
        """Free one group, or the world."""
        dist.destroy_process_group(group)

    def has_threads_with_tensors(self, backend: str) -> bool:
        """gloo's do."""
        return "gloo" in backend

    def is_timeout(self, error: BaseException) -> bool:
        """Whether a peer was late or lost."""
        if isinstance(error, (TimeoutError, ConnectionError, dist.DistNetworkError)):
            return True
        return isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None

    def store_set(self, store: Any, key: str, value: bytes) -> None:
        """Publish."""
        store.set(key, value)

    def store_get(self, store: Any, key: str) -> bytes | None:
        """Read without waiting."""
        return store.get(key) if store.check([key]) else None

    # --- what the backend can do
    def native_reduce_ops(self, device_type: str) -> frozenset[str]:
        """Reduce operations of the device's backend."""
        return self._devices[device_type].comm.reduce_ops

    def can_reduce(self, dtype: Any, device_type: str) -> bool:
        """Whether the device's backend reduces the dtype."""
        reducible = self._devices[device_type].comm.reducible
        # See [Note: complex numbers] in hp_platform.torch._wire.
        return dtype in reducible or (dtype.is_complex and dtype.to_real() in reducible)

    def can_coalesce(self, device_type: str) -> bool:
        """Whether several collectives go in one launch."""
        return self._devices[device_type].comm.coalesces

    def can_exchange_lists(self, device_type: str) -> bool:
        """Whether several exchanges go in one launch."""
        return self._devices[device_type].comm.exchanges_lists
