"""What ranks tell each other once, when something is set up: short texts, through the job's key-value store."""

from __future__ import annotations

import time

from hp_platform import _process, collectives
from hp_platform.collectives import CollectiveTimeoutError
from hp_platform.group import ProcessGroup
from hp_platform.platform import get_platform

_PAUSE_S = 1e-3


def told(text: str, group: ProcessGroup) -> list[str]:
    """Every rank's text, by rank. All ranks of the group call, and wait for each other on the host.

    Communication: the key-value store alone, no device takes part; in a world without one, as
    :func:`hp_platform.collectives.all_gather_object`. CollectiveTimeoutError if a rank has not come within the group's time-out.
    """
    world = _process.state.world
    store = None if world is None or world.tables is None else world.tables.store
    if store is None or group.size == 1:
        return collectives.all_gather_object(text, group)
    platform, counts = get_platform(), _process.state.num_meetings
    number = counts.get(group.ranks, 0)
    counts[group.ranks] = number + 1
    prefix = f"hp/meeting/{','.join(map(str, group.ranks))}/{number}"
    platform.store_set(store, f"{prefix}/{group.rank}", text.encode())
    deadline = time.monotonic() + group.timeout.total_seconds()
    texts = []
    for rank in range(group.size):
        found = platform.store_get(store, f"{prefix}/{rank}")
        while found is None:
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(
                    f"rank {group.ranks[rank]} did not come to meeting number {number} of the {group.describe()} within "
                    f"{group.timeout.total_seconds():g} s: all ranks must set up the same things in the same order"
                )
            time.sleep(_PAUSE_S)
            found = platform.store_get(store, f"{prefix}/{rank}")
        texts.append(found.decode())
    return texts
