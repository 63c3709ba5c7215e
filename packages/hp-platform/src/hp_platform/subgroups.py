"""Groups of some ranks of the world: found by their ranks, split off, or registered.

Groups are made at their first request, by their members only, and the same ranks always give the same object.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from hp_platform.group import ProcessGroup
from hp_platform.platform import get_platform
from hp_platform.process_groups import checked_timeout, enter, get_world, resolve


def group_of(ranks: Iterable[int], *, timeout: timedelta | None = None) -> ProcessGroup:
    """The group of these global ranks (any order, no duplicates), of which this process is one.

    Made at the first request, by its members only: all of them must ask, in the same order relative to their other groups.
    ``timeout`` (default: the world's) counts only when the group is made. ValueError for ranks outside of the world or given
    twice, RuntimeError if this process is not among them, :class:`hp_platform.CollectiveTimeoutError` if a member does not
    ask in time. Communication: the backend's set-up at the first request.
    """
    world = get_world()
    limit = checked_timeout(timeout, world.timeout)
    given = [int(rank) for rank in ranks]
    wanted = tuple(sorted(given))
    if not wanted:
        raise ValueError("a group needs at least one rank, got none")
    if len(set(wanted)) != len(wanted):
        raise ValueError(f"a rank is given twice in {given}")
    if wanted[0] < 0 or wanted[-1] >= world.size:
        raise ValueError(
            f"ranks {given} are not all in the world of {world.size} ranks (0 to {world.size - 1})"
        )
    tables = world.tables
    assert tables is not None
    found = tables.groups.get(wanted)
    if found is not None:
        return found
    if world.rank not in wanted:
        raise RuntimeError(
            f"rank {world.rank} is not in the group of ranks {list(wanted)}; only members may ask for a group"
        )
    group = ProcessGroup(wanted, wanted.index(world.rank), world.backend, limit, None)
    if len(wanted) > 1:
        group.native = _new_group(group)
    enter(tables, group)
    return group


def create_group(rank_list: Sequence[int]) -> ProcessGroup:
    """:func:`group_of` under the reference's name."""
    return group_of(rank_list)


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> ProcessGroup | None:
    """Split the parent (default: the world) into groups: the one that holds this process, or None if none does.

    ``split_ranks`` is a list of lists of global ranks, the same on every rank of the parent; lists may not overlap.
    ``pg_options`` and ``group_desc`` are accepted for torch's signature; a group's options are those of the world.
    ValueError for a missing or empty list, overlapping lists, or ranks outside of the parent.
    """
    parent = resolve(parent_pg)
    if not split_ranks or not all(hasattr(part, "__len__") and len(part) for part in split_ranks):
        raise ValueError(
            f"split_ranks must be a list of non-empty lists of global ranks, got {split_ranks!r}"
        )
    flat = [rank for part in split_ranks for rank in part]
    if len(set(flat)) != len(flat):
        raise ValueError(f"split_ranks overlap: {[list(part) for part in split_ranks]}")
    outside = sorted(set(flat) - set(parent.ranks))
    if outside:
        raise ValueError(f"ranks {outside} of split_ranks are not in the parent, the {parent.describe()}")
    mine = [part for part in split_ranks if parent.global_rank in part]
    return group_of(mine[0], timeout=timeout) if mine else None


def mark_created_groups(groups: Any) -> None:
    """Register groups that the user or the framework has made (one, or a list; the framework's handles or ours).

    Later requests for the same ranks get them. Groups that do not hold this process are passed over. ValueError for a group
    whose ranks do not ascend: by rank, collectives would give its members' tensors in another order. No communication.
    """
    world = get_world()
    tables = world.tables
    assert tables is not None
    platform = get_platform()
    for given in groups if isinstance(groups, (list, tuple)) else [groups]:
        if isinstance(given, ProcessGroup):
            enter(tables, given)
            continue
        ranks = tuple(platform.native_ranks(given))
        if world.rank in ranks and list(ranks) != sorted(ranks):
            raise ValueError(
                f"the group's ranks are {list(ranks)}, in this order; make it with ascending ranks, as group_of does"
            )
        known = tables.groups.get(ranks)
        if world.rank in ranks and (known is None or known.native is not given):
            timeout = platform.native_timeout(given) or world.timeout
            enter(tables, ProcessGroup(ranks, ranks.index(world.rank), world.backend, timeout, given))


def _new_group(group: ProcessGroup) -> Any:
    platform = get_platform()
    try:
        return platform.new_group(group.ranks, group.timeout)
    except Exception as error:
        if not platform.is_timeout(error):
            raise
        from hp_platform.collectives import CollectiveTimeoutError

        raise CollectiveTimeoutError(
            f"rank {group.global_rank} asked for the {group.describe()}, and not every other one of them did "
            f"within {group.timeout.total_seconds():g} s, or one is gone: all members must ask for it, in the same order "
            f"relative to their other groups ({error})"
        ) from error
