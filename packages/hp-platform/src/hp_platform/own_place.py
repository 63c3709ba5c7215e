"""Which rank and which device this process is to be, when it joins a world."""

from __future__ import annotations

from typing import Any

from hp_platform import launch
from hp_platform.platform import get_platform


def find_place(rank: int, world_size: int) -> tuple[int, int]:
    """Rank and world size as given, else as the launcher says, else (0, 1). ValueError if they do not fit."""
    if (rank < 0) != (world_size < 0):
        raise ValueError(
            f"give both rank and world_size, or neither: got rank={rank}, world_size={world_size}"
        )
    if rank < 0:
        environment = launch.environment()
        if environment is None:
            return 0, 1
        rank, world_size = environment.rank, environment.world_size
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank must lie between 0 and world_size - 1: got rank={rank}, world_size={world_size}"
        )
    return rank, world_size


def kind_of(device_id: Any) -> str:
    """The kind of ``device_id`` (``"cuda:1"``, ``"cuda"``); None: of the best available device."""
    platform = get_platform()
    return (
        platform.device().name
        if device_id is None
        else platform.device(str(device_id).partition(":")[0]).name
    )


def choose_device(kind: str, device_id: Any) -> None:
    """Make the device of ``device_id`` the current one; without an index the one of the launcher's local rank.

    A device other than the first that the program has chosen stays.
    """
    handle = get_platform().device(kind)
    if has_index(device_id):
        handle.set_current(_index(device_id))
        return
    environment = launch.environment()
    if environment is not None and handle.count() > 1 and _index(handle.current()) == 0:
        handle.set_current(environment.local_rank % handle.count())


def has_index(device: Any) -> bool:
    """Whether a device is named with its index."""
    return device is not None and ":" in str(device)


def _index(device: Any) -> int:
    _, _, index = str(device).partition(":")
    return int(index or 0)
