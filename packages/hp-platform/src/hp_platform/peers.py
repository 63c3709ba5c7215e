"""Peer memory for a group, where its ranks are devices of one machine that reach each other's memory."""

from __future__ import annotations

from collections.abc import Callable

from hp_platform import launch
from hp_platform.group import ProcessGroup
from hp_platform.meeting import told
from hp_platform.platform import get_platform
from hp_platform.protocols.peer import PeerMemory
from hp_platform.protocols.tensor import DType


def peer_memory(numel: int, dtype: DType, device: str, group: ProcessGroup) -> PeerMemory | None:
    """``numel`` elements on every rank of the group, see :class:`hp_platform.protocols.peer.PeerMemory`. None, on all ranks, where
    they do not reach each other's memory.

    All ranks call, and wait for each other on the host. Communication: three short texts through the key-value store
    (:func:`hp_platform.meeting.told`), and the framework's own exchange of addresses.
    """
    platform = get_platform()
    if group.size == 1 or not platform.supports("peer_memory", device):
        return None
    domains = told(platform.peer_domain(device) or "", group)
    if "" in domains or len(set(domains)) > 1:
        return None
    made: list[PeerMemory] = []
    # One after the other: who has no memory must not leave the others waiting where they join.
    for step in (
        lambda: made.append(platform.peer_memory(numel, dtype, device, group.native, group.timeout)),
        lambda: made[0].join(),
    ):
        if any(told(_failure(step), group)):
            return None
    return made[0]


def may_reach_each_other(device: str, group: ProcessGroup) -> bool:
    """Whether :func:`peer_memory` may find that the ranks do, as far as this rank knows without asking: its own device reaches others,
    and the launcher, if it tells which ranks are on this host, counts the group's among them. No communication.
    """
    platform = get_platform()
    if (
        group.size == 1
        or not platform.supports("peer_memory", device)
        or platform.peer_domain(device) is None
    ):
        return False
    place = launch.environment()
    if place is None or place.local_world_size is None or place.rank != group.global_rank:
        return True
    first = place.rank - place.local_rank
    return all(first <= rank < first + place.local_world_size for rank in group.ranks)


def _failure(step: Callable[[], None]) -> str:
    """What went wrong; "" if nothing. There are collectives, but all ranks must do without peer memory, or none."""
    try:
        step()
    except RuntimeError as error:
        return str(error) or type(error).__name__
    return ""
