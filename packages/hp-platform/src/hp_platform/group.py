"""Process groups as values: which ranks, which of them is this process, and the tables that hang on the world."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_platform.mesh import DeviceMesh

DEFAULT_TIMEOUT = timedelta(minutes=10)


@dataclass(eq=False)
class ProcessGroup:
    """Some ranks of the world that communicate; made by :mod:`process_groups` and :mod:`subgroups`, compared by identity.

    Two requests for the same ranks give the same object.
    """

    ranks: tuple[int, ...]
    """Global ranks, ascending."""
    rank: int
    """Position of this process in ``ranks``."""
    backend: str
    """``gloo``, ``nccl``, ``hccl``, ``mccl``; with several device kinds such as ``cpu:gloo,cuda:nccl``."""
    timeout: timedelta
    native: Any = field(repr=False)
    """The backend's own handle; None for a group of one rank, which never communicates, and for one that was ended."""
    num_launches: int = 0
    """How many collectives this process has started on the group: what ranks compare when one of them is missing."""
    last_kind: str = ""
    """The kind of the last one."""
    purpose: str = ""
    """What collectives that start now are for, such as the gather of a unit; who starts them says so, and clears it behind them."""
    last_purpose: str = ""
    """Of the last one."""
    last_wait: tuple[int, str] = (0, "")
    """The number of the collective in which this rank has waited for long, and what was said of it."""
    last_time: float = 0.0
    """When that was, by time.monotonic()."""
    num_transfers: int = 0
    """How many sends and receives this process has started; unlike collectives, other ranks have other numbers."""
    halves: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Of peer memory, by device and dtype: see :func:`hp_platform.halves.shared_halves`."""
    tables: WorldTables | None = field(default=None, repr=False)
    """Only on the world."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def global_rank(self) -> int:
        """This process' rank in the world."""
        return self.ranks[self.rank]

    def describe(self) -> str:
        """For messages: the ranks, short."""
        shown = ", ".join(map(str, self.ranks)) if self.size <= 8 else f"{self.ranks[0]} ... {self.ranks[-1]}"
        return f"group of {self.size} (ranks {shown})"


@dataclass(eq=False)
class WorldTables:
    """What hangs on the default process group, and goes with it."""

    device_type: str
    """The kind of device that the world was made for."""
    store: Any = None
    """The key-value store that all ranks share."""
    groups: dict[tuple[int, ...], ProcessGroup] = field(default_factory=dict)
    """Ascending global ranks -> group. The world itself is among them."""
    meshes: dict[Any, DeviceMesh] = field(default_factory=dict)
    """Request of ``init_device_mesh`` -> mesh."""
    diagnosis: Any = None
    """The thread that publishes this rank's progress (:mod:`hp_platform.diagnosis`)."""
