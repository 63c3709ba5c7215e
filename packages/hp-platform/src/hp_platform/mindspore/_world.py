"""The world, groups and the key-value store of MindSpore.

[Note: one world per process] MindSpore's CPU build joins a world once: after leaving it, a second initialisation succeeds and
its first collective fails. So the world stays joined until the process ends; ending it here is a barrier and a book entry,
and joining again (same rank, same size) takes it up again.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import mindspore
import numpy as np
from mindspore import communication
from mindspore.communication import GlobalComm
from mindspore.mint import distributed

from hp_platform.launch._ports import share
from hp_platform.mindspore import _private
from hp_platform.mindspore._p2p import PeerTimeoutError
from hp_platform.mindspore._store import Store

CPU_TIMEOUT_VARIABLE = "MS_CPU_COMM_OP_TIMEOUT"
"""Seconds that a collective on CPU waits for its peers; MindSpore reads it once."""

_LOST = tuple(
    f"{kind} failed" for kind in ("AllReduce", "AllGather", "Broadcast", "Scatter", "Gather", "Send", "Recv")
) + (
    "TCP get operation failed",
    "TCP set operation failed",
    "TCP addition operation failed",
    "imeout",
    "imed out",
)


class OutOfStepError(RuntimeError):
    """Ranks of a group were in different collectives, and MindSpore let them finish."""


class MindSporeWorldOps:
    """The part of :class:`hp_platform.protocols.CommOps` that makes and ends groups."""

    _joined: tuple[str, int, int, Any] | None = None
    """Backend, rank, world size and TCP store of the world that this process has joined."""
    _incarnation = 0
    _store: Store | None = None

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
    ) -> tuple[str, str, Any]:
        """Join all processes: through a store, or under msrun through its scheduler."""
        del device_id
        if options is not None:
            raise ValueError(f"MindSpore's world takes no options, got {options!r}; leave pg_options out")
        name = self.device(device_type).comm_backend  # type: ignore[attr-defined]
        if backend not in (None, name):
            raise ValueError(
                f"backend {backend!r} does not serve MindSpore on {device_type}; use {name!r} or None"
            )
        if self._joined is not None:
            if self._joined[1:3] != (rank, world_size):
                raise RuntimeError(
                    f"this process has joined a world as rank {self._joined[1]} of {self._joined[2]} before, and MindSpore joins "
                    f"one per process: it cannot become rank {rank} of {world_size}; start a new process"
                )
        else:
            # MindSpore reads it at its first collective; what the user has set stands.
            os.environ.setdefault(CPU_TIMEOUT_VARIABLE, str(max(1, round(timeout.total_seconds()))))
            # Initialising takes over how Python reports an uncaught exception; that is the program's own affair.
            hook = sys.excepthook
            try:
                tcp = _join(name, rank, world_size, timeout, init_method, store)
            finally:
                sys.excepthook = hook
            _private.name_world_group(GlobalComm.WORLD_COMM_GROUP)
            self._joined = (name, rank, world_size, tcp or _common_store(rank, world_size, timeout))
        store = self._new_store()
        # All ranks but 0 take some seconds longer to initialise: with a short time-out the first collective would fail.
        store.meet("joined", world_size, timeout.total_seconds())
        return GlobalComm.WORLD_COMM_GROUP, name, store

    def adopt_world(self) -> tuple[str, str, Any] | None:
        """The world that the user has initialised through MindSpore.

        msrun starts the program once more as its scheduler: that process serves the ranks here, and ends.
        """
        if os.environ.get("MS_ROLE") == "MS_SCHED":
            communication.init()
            raise SystemExit(0)
        if self._joined is not None or not GlobalComm.INITED:
            return None
        _private.name_world_group(GlobalComm.WORLD_COMM_GROUP)
        name = str(GlobalComm.BACKEND)
        rank, world_size = communication.get_rank(), communication.get_group_size()
        self._joined = (name, rank, world_size, _common_store(rank, world_size, _TIME_TO_ADOPT))
        return GlobalComm.WORLD_COMM_GROUP, name, self._new_store()

    def _new_store(self) -> Store:
        """See [Note: one world per process]."""
        assert self._joined is not None
        self._incarnation = self._incarnation + 1
        # The same seconds for the store's messages as for MindSpore's own.
        seconds = float(os.environ.get(CPU_TIMEOUT_VARIABLE, "30"))
        self._store = Store(self._joined[3], f"hp{self._incarnation}/", seconds)
        return self._store

    def native_ranks(self, group: str) -> tuple[int, ...]:
        """Global ranks of a group."""
        return tuple(distributed.get_process_group_ranks(group))

    def native_timeout(self, group: str) -> timedelta | None:
        """On the CPU one for all groups, by a variable; other backends do not tell theirs."""
        del group
        on_cpu = self._joined is not None and self._joined[0] == "mccl"
        return timedelta(seconds=float(os.environ.get(CPU_TIMEOUT_VARIABLE, "30"))) if on_cpu else None

    def native_rank(self, group: str) -> int:
        """Place in a group."""
        return communication.get_rank(group)

    def new_group(self, ranks: Sequence[int], timeout: timedelta, backend: str | None = None) -> str:
        """A group; MindSpore has one time-out for all groups, that of the world.

        The name says the ranks, so that all members find the same; asking again after the group was ended takes it up again.
        """
        name = "hp_" + "_".join(map(str, ranks))
        if name not in self._groups:
            communication.create_group(name, list(ranks))
            self._groups.add(name)
        return name

    def __init__(self) -> None:
        super().__init__()
        self._groups: set[str] = set()

    def destroy_group(self, group: str | None) -> None:
        """End a group, or (None) the world: a barrier after which rank 0, who keeps the store, leaves last.

        On CPU MindSpore cannot free a group and logs an error when asked to, so the group stays for the next who wants it.
        """
        if group is not None or self._joined is None:
            return
        _, rank, world_size, _ = self._joined
        self.barrier(GlobalComm.WORLD_COMM_GROUP, False)  # type: ignore[attr-defined]
        if self._store is not None:
            # All ranks have passed the barrier when rank 0 begins to wait, so the seconds are far more than any needs.
            self._store.meet("left", world_size, 5.0 if rank == 0 else 0.0)
        self._store = None

    def has_threads_with_tensors(self, backend: str) -> bool:
        """None do."""
        return False

    def is_timeout(self, error: BaseException) -> bool:
        """Whether a peer did not come or is gone. MindSpore says only which collective failed."""
        if isinstance(error, (OutOfStepError, PeerTimeoutError)):
            return True
        return isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST)

    def _enter_step(self, group: str, signature: str) -> Callable[[], None]:
        """Tell the store what this rank is about to launch; returns the check that all ranks of the group did the same.

        [Note: being in step] When ranks meet in different collectives, or with different sizes, MindSpore's CPU build takes one's
        message for the other's and returns wrong numbers. So every launch counts itself under its signature, and after it
        the count must hold all ranks: they have counted before they sent what has arrived.
        """
        store = self._store
        if store is None:
            return lambda: None
        key = f"step/{group}/{signature}"
        mine = store.number(key)
        size = len(self.native_ranks(group))
        store.count(key, 1)

        def check() -> None:
            present = store.count(key, 0)
            if present < mine * size:
                raise OutOfStepError(
                    f"{mine * size - present} of {size} ranks of the group were in another collective, or had another size"
                )

        return check

    def store_set(self, store: Store, key: str, value: bytes) -> None:
        """Publish."""
        store.set(key, value)

    def store_get(self, store: Store, key: str) -> bytes | None:
        """Read without waiting."""
        return store.get(key)


_TIME_TO_ADOPT = timedelta(seconds=60)
"""Adopting a world is done by all ranks at about the same time."""


def _common_store(rank: int, world_size: int, timeout: timedelta) -> Any:
    """A store for a world that was made without one (msrun's scheduler, or by the user): rank 0 tells the others its port."""
    host = socket.gethostbyname(
        os.environ.get("MS_SCHED_HOST") or os.environ.get("MASTER_ADDR") or "127.0.0.1"
    )
    with (
        socket.socket() as bound
    ):  # until the store listens: see [Note: reserved ports] in hp_platform.launch._ports
        bound.bind(("", 0))
        share(bound)
        port = mindspore.Tensor(np.array([bound.getsockname()[1]], np.int64))
        ports = [mindspore.Tensor(np.zeros(1, np.int64)) for _ in range(world_size)]
        distributed.all_gather(ports, port)
        return distributed.TCPStore(host, int(ports[0].asnumpy()[0]), world_size, rank == 0, timeout)


def _join(
    backend: str, rank: int, world_size: int, timeout: timedelta, init_method: str | None, store: Any
) -> Any:
    """Initialise MindSpore's world; its TCP store, or None under msrun's scheduler."""
    if isinstance(store, Store):
        raise ValueError("store must be a mindspore.mint.distributed.TCPStore, got this library's own")
    if store is None:
        address = _address(init_method)
        if address is None:
            communication.init(backend)
            return None
        host, port = address
        store = distributed.TCPStore(host, port, world_size, rank == 0, timeout)
    _private.init_with_store(
        backend=backend, timeout=timeout, world_size=world_size, rank=rank, store=store, group_name=""
    )
    return store


def _address(init_method: str | None) -> tuple[str, int] | None:
    """Host (as numbers, MindSpore takes no names) and port of the store; None: MindSpore's own scheduler (msrun)."""
    if init_method not in (None, "env://"):
        assert init_method is not None
        host, colon, port = init_method.removeprefix("tcp://").rpartition(":")
        if not init_method.startswith("tcp://") or not colon or not port.isdigit():
            raise ValueError(f"init_method must be 'env://' or 'tcp://host:port', got {init_method!r}")
        return socket.gethostbyname(host), int(port)
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if host and port.isdigit():
        # torchrun keeps a store of its own at MASTER_PORT.
        return socket.gethostbyname(host), int(port) + 1
    if os.environ.get("MS_SCHED_HOST"):
        return None
    raise ValueError(
        "nothing says where the ranks meet: set MASTER_ADDR and MASTER_PORT (the store listens on the next port), "
        "start under msrun, or pass init_method='tcp://host:port'"
    )
