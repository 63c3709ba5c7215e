"""The default process group (the world), and what is asked of any group: torch.distributed's names, on every framework.

The world is the only group that belongs to the process; all others (:mod:`hp_platform.subgroups`), and the meshes, hang on
it and go with it.
"""

from __future__ import annotations

import atexit
import sys
from datetime import timedelta
from typing import Any

from hp_platform import _process
from hp_platform.diagnosis import Publisher
from hp_platform.group import DEFAULT_TIMEOUT, ProcessGroup, WorldTables
from hp_platform.own_place import choose_device, find_place, has_index, kind_of
from hp_platform.platform import get_platform


def init_process_group(
    backend: str | None = None,
    *,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    pg_options: Any = None,
    device_id: Any = None,
) -> None:
    """Join the job's processes to the default group.

    Args:
        backend: ``gloo``, ``nccl``, ``hccl``, ``mccl``, or torch's composite form; None: by the best available device
            (``device_id``'s kind if that is given).
        init_method, store: where the ranks meet, as in torch.distributed; None: MASTER_ADDR and MASTER_PORT.
        timeout: how long a collective waits for its peers; default 10 minutes.
        world_size, rank: default: the variables of torchrun or msrun. Where there are none, the world is this one process,
            and nothing ever communicates.
        pg_options: handed to the backend.
        device_id: the device of this process (``"cuda:1"``), which becomes the current one. A kind alone (``"cuda"``), or
            None: the launcher's local rank chooses, unless the program has chosen a device other than the first.

    If the user has initialised the framework's own default group, that one is adopted with its backend and meeting place;
    ``timeout`` is then its own where the framework tells it, and counts for the groups that are made of its ranks.
    RuntimeError if the world exists; ValueError if only one of rank and world_size is given, or they do not fit.
    Communication: the rendezvous, by all ranks.
    """
    if _process.state.world is not None:
        raise RuntimeError(
            f"the default process group exists already ({_process.state.world.describe()}): call destroy_process_group() first"
        )
    platform = get_platform()
    asked, timeout = timeout, checked_timeout(timeout, DEFAULT_TIMEOUT)
    adopted = platform.adopt_world()
    if adopted is not None:
        native, name, found_store = adopted
        ranks, place = platform.native_ranks(native), platform.native_rank(native)
        if (rank, world_size) not in ((-1, -1), (place, len(ranks))):
            raise ValueError(
                f"the framework's own default group is rank {place} of {len(ranks)}, and is adopted; got rank={rank}, "
                f"world_size={world_size}: leave them out"
            )
        own = platform.native_timeout(native) if asked is None else None
        _install(ranks, place, name, own or timeout, native, found_store, kind_of(device_id))
        return

    rank, world_size = find_place(rank, world_size)
    kind = kind_of(device_id)
    choose_device(kind, device_id)
    if world_size == 1:
        name = backend or platform.device(kind).comm_backend
        _install((0,), 0, name, timeout, None, None, kind)
        return
    native, name, shared = platform.create_world(
        backend=backend,
        device_type=kind,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        init_method=init_method,
        store=store,
        device_id=device_id if has_index(device_id) else None,
        options=pg_options,
    )
    _install(tuple(range(world_size)), rank, name, timeout, native, shared, kind)


def is_initialized() -> bool:
    """Whether the default group exists."""
    return _process.state.world is not None


def ensure_initialized(device_type: str | None = None) -> ProcessGroup:
    """The default group; made with all defaults if there is none, for the kind of device that is going to be used
    (what meshes and fully_shard do, so that a mesh of cpus never brings a world of accelerators).
    """
    if _process.state.world is None:
        init_process_group(device_id=device_type)
    return get_world()


def get_world() -> ProcessGroup:
    """The default group. RuntimeError if there is none."""
    if _process.state.world is None:
        raise RuntimeError("there is no default process group: call hp_platform.init_process_group() first")
    return _process.state.world


def resolve(group: ProcessGroup | None) -> ProcessGroup:
    """The group itself, or the world. ValueError for another object, such as the framework's own handle."""
    if group is None:
        return get_world()
    if not isinstance(group, ProcessGroup):
        raise ValueError(
            f"expected a hp_platform.ProcessGroup or None, got {type(group).__name__}; "
            "register a group that the framework made with mark_created_groups"
        )
    return group


def get_rank() -> int:
    """This process' rank in the world."""
    return get_world().rank


def get_world_size() -> int:
    """Number of ranks in the world."""
    return get_world().size


def world_device() -> str:
    """The device on which the world communicates by default, such as ``"cuda:1"``."""
    tables = get_world().tables
    assert tables is not None
    return get_platform().device(tables.device_type).current()


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """End one group, or (None) the world with all groups and meshes that hang on it. No peer may be in a collective of it.

    ValueError for a group that is not one of the present world.
    """
    world = get_world()
    group = resolve(group)
    tables = world.tables
    assert tables is not None
    if group is not world:
        if tables.groups.get(group.ranks) is not group:
            raise ValueError(f"the {group.describe()} does not belong to the present world")
        del tables.groups[group.ranks]
        group.halves.clear()
        if group.native is not None:
            get_platform().destroy_group(group.native)
            group.native = None
        return
    if tables.diagnosis is not None:
        tables.diagnosis.stop()
    _process.state.world = None
    for own in tables.groups.values():
        own.halves.clear()
    atexit.unregister(_end_before_exit)
    if world.native is not None:
        get_platform().destroy_group(None)
    for own in tables.groups.values():
        own.native = None  # the backend frees a group, and ends its threads, when nobody refers to it


def _end_before_exit() -> None:
    """End the world of a program that does not, where the backend's threads hold tensors.

    [Note: exit with threads] Such a thread (gloo's are) may drop a tensor when the interpreter is already being taken down,
    which ends the process with "terminate called without an active exception". After an error nothing is ended: peers may be
    waiting in a collective, and so would this rank, while the job should end at once.
    """
    world = _process.state.world
    if world is None or getattr(sys, "last_value", None) is not None:
        return
    if get_platform().has_threads_with_tensors(world.backend):
        destroy_process_group()


def get_process_group_ranks(group: ProcessGroup | None = None) -> list[int]:
    """Global ranks of the group (default: the world), ascending."""
    return list(resolve(group).ranks)


def get_backend(group: ProcessGroup | None = None) -> str:
    """The communication backend's name."""
    return resolve(group).backend


def get_group_local_rank(group: ProcessGroup | None = None) -> int:
    """This process' rank within the group (default: the world)."""
    return resolve(group).rank


def checked_timeout(timeout: timedelta | None, default: timedelta) -> timedelta:
    """The time-out, or the default for None. ValueError where it is no time that passes."""
    if timeout is None:
        return default
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise ValueError(f"timeout must be a positive datetime.timedelta, got {timeout!r}")
    return timeout


def _install(
    ranks: tuple[int, ...],
    rank: int,
    backend: str,
    timeout: timedelta,
    native: Any,
    store: Any,
    device_type: str,
) -> None:
    tables = WorldTables(device_type, store)
    world = ProcessGroup(ranks, rank, backend, timeout, native, tables=tables)
    if store is not None:
        tables.diagnosis = Publisher(get_platform(), store, rank)
    enter(tables, world)
    _process.state.world = world
    atexit.register(_end_before_exit)


def enter(tables: WorldTables, group: ProcessGroup) -> None:
    """Make the group the one of its ranks, whose missing members are told after a time-out."""
    tables.groups[group.ranks] = group
    if tables.diagnosis is not None and group.size > 1:
        tables.diagnosis.watch(group)
