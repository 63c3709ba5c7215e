"""All state that belongs to the process as a whole; nothing else in the tree may keep any.

Everything else hangs on the object that owns it: group and mesh tables on the default process group, specs on their mesh,
sharding state on its root module. Two models in one process never meet.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_platform.group import ProcessGroup
    from hp_platform.mesh import DeviceMesh
    from hp_platform.platform import Platform
    from hp_platform.random_stream import RandomStream
    from hp_platform.recording import CollectiveRecord


@dataclass
class ProcessState:
    """What there is one of per process."""

    platform: Platform | None = None
    made_for_platform: dict[Any, Any] = field(default_factory=dict)
    """See :func:`hp_platform.on_platform.once`."""
    upon_platform: list[Any] = field(default_factory=list)
    """What waits for the platform to be known; see :func:`hp_platform.on_platform.when_known`."""
    world: ProcessGroup | None = None
    """The default process group; group and mesh tables hang on it."""
    random_stream: RandomStream | None = None
    """Numbers the random operations that are given no stream of their own."""
    writing: Any = None
    """The checkpoint that a thread writes in the background, or wrote last (a ``concurrent.futures.Future``). The next save waits for it."""
    sharded_roots: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    """What the outermost sharded modules keep of their steps: asked by those who wait for all gradients of the process."""
    swap_manager: Any = None
    """Moves saved tensors to the host's memory and back (:class:`hp_recompute.SwapManager`)."""
    registrations: Any = None
    """What counts the parameters and modules that are hung into modules, where the framework tells of them; None before anybody asked."""
    num_meetings: dict[tuple[int, ...], int] = field(default_factory=dict)
    """How often just these ranks have told each other a text (:func:`hp_platform.meeting.told`): also in groups and worlds that were
    ended since, whose texts may still be in the store."""


state = ProcessState()

mesh_stack: ContextVar[tuple[DeviceMesh, ...]] = ContextVar("hp_mesh_stack", default=())
"""Meshes entered with ``with mesh:``, innermost last."""


skip_stack: ContextVar[tuple[frozenset[str], ...]] = ContextVar("hp_skip_stack", default=())
"""Blocks of SkipDTensorDispatch entered, innermost last, each with the names of the operations that it does not skip."""


spmd_watcher: ContextVar[Any] = ContextVar("hp_spmd_watcher", default=None)
"""What looks at every operation inside of a block of check_spmd, innermost; None outside, and while it runs an operation."""


parallel_losses: ContextVar[Any] = ContextVar("hp_parallel_losses", default=None)
"""What says which rules losses follow inside of a block of loss_parallel, innermost; None outside."""


checkpoint_runs: ContextVar[tuple[Any, ...]] = ContextVar("hp_checkpoint_runs", default=())
"""First and second runs of checkpointed functions that are under way, innermost last."""


start_of_workers: ContextVar[Any] = ContextVar("hp_start_of_workers", default=None)
"""How workers are started (:class:`hp_platform.launch._child.Start`) if not as fresh Pythons: the harness forks those of a program."""


collective_keepers: ContextVar[tuple[Any, ...]] = ContextVar("hp_collective_keepers", default=())
"""Who keeps or gives results of collectives, innermost last; see :mod:`hp_platform.keeping`."""


class OpenModes:
    """How many blocks that change how operations run (SkipDTensorDispatch, check_spmd, loss_parallel) are open in the whole process.

    Every operation asks this one plain number before its context.
    """

    __slots__ = ("_lock", "count")

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        """One more, or (-1) one less."""
        with self._lock:
            self.count = self.count + number


open_modes = OpenModes()


class OpenRecorders:
    """Records that are open in the process. Not a context variable: backward runs on the framework's own threads."""

    def __init__(self) -> None:
        self.records: tuple[CollectiveRecord, ...] = ()

    @contextmanager
    def adding(self, record: CollectiveRecord) -> Iterator[None]:
        """Open ``record`` inside."""
        self.records = (*self.records, record)
        try:
            yield
        finally:
            self.records = tuple(r for r in self.records if r is not record)


class LivingStreams:
    """Streams of random operations that somebody holds. Any thread may make one."""

    def __init__(self) -> None:
        self._streams: weakref.WeakSet[RandomStream] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, stream: RandomStream) -> None:
        """Until it is gone."""
        with self._lock:
            self._streams.add(stream)

    def all(self) -> list[RandomStream]:
        """In no order."""
        with self._lock:
            return list(self._streams)


living_streams = LivingStreams()
"""See :func:`hp_platform.random_stream.living_random_streams`."""


open_recorders = OpenRecorders()
"""See :mod:`hp_platform.recording`."""
