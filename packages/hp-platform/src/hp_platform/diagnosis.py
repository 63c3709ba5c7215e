"""Who is missing when a collective times out.

A backend says at best "timed out". To name the missing rank without slowing any launch down, every rank counts its launches
per group (an integer, in memory), and a thread publishes the counts to the job's key-value store now and then. The rank
that has waited in vain reads what the others published last: who has counted less has not come, whose count stands on
another collective is out of step, whose heart does not beat is gone.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hp_platform.group import ProcessGroup

if TYPE_CHECKING:
    from hp_platform.platform import Platform

PERIOD_SECONDS = 0.5
"""How often a rank publishes; a missing rank is named this much later than the time-out, times three."""


POINT_TO_POINT = frozenset({"send", "recv", "batch_send_recv"})
"""Kinds that concern two ranks only, so that their number tells nothing about the others."""

PATIENCE = 0.75
"""Part of a group's time-out after which a rank that waits says for whom, on standard error: some backends (NCCL, HCCL) end
the process at the time-out, and then nothing can be said any more."""


def count_launch(group: ProcessGroup, kind: str) -> int:
    """Count one launch of this rank on the group; returns its number among its like, from 1."""
    if kind in POINT_TO_POINT:
        group.num_transfers = group.num_transfers + 1
        return group.num_transfers
    group.num_launches = group.num_launches + 1
    group.last_kind = kind
    group.last_purpose = group.purpose
    group.last_time = time.monotonic()
    return group.num_launches


class Publisher:
    """The thread that publishes this rank's progress. Hangs on the world's tables, ends with :meth:`stop`."""

    def __init__(self, platform: Platform, store: Any, rank: int) -> None:
        self._platform = platform
        self._store = store
        self._rank = rank
        self._groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
        self._beat = 0
        self._lock = threading.Lock()  # publish() is also called by a thread that reports a time-out
        self._stopped = threading.Event()
        self.error: Exception | None = None
        """Why this rank no longer publishes."""
        self._thread = threading.Thread(target=self._run, name="hp-diagnosis", daemon=True)
        self._thread.start()
        # A thread that comes back from the store into an interpreter that is being taken down ends the whole process with
        # "terminate called without an active exception": programs need not destroy the process group, so it ends here.
        atexit.register(self.stop)

    def watch(self, group: ProcessGroup) -> None:
        """Publish this group's progress too."""
        self._groups.add(group)

    def stop(self) -> None:
        """End the thread; the store may go away after that."""
        atexit.unregister(self.stop)
        self._stopped.set()
        self._thread.join(
            2 * PERIOD_SECONDS
        )  # a daemon: a store that does not answer must not hold up the end

    def publish(self) -> None:
        """Tell the other ranks how far this one is."""
        with self._lock:
            self._beat = self._beat + 1
            progress = {_key(g): [g.num_launches, g.last_kind, g.last_purpose] for g in list(self._groups)}
            message = json.dumps({"beat": self._beat, "groups": progress})
            self._platform.store_set(self._store, f"hp/progress/{self._rank}", message.encode())

    def read(self, rank: int) -> dict[str, Any] | None:
        """What a rank published last."""
        found = self._platform.store_get(self._store, f"hp/progress/{rank}")
        return None if found is None else json.loads(found)

    def _tell_of_long_waits(self) -> None:
        """Once per collective: if this rank has started nothing since, and another one has not come to it."""
        now = time.monotonic()
        for group in list(self._groups):
            number, waited = group.num_launches, now - group.last_time
            if (
                not number
                or waited < PATIENCE * group.timeout.total_seconds()
                or group.last_wait[0] == number
            ):
                continue
            group.last_wait = (number, "")
            missing = _missing(group, {rank: self.read(rank) for rank in group.ranks}, before=None)
            if missing:
                what = (
                    f"{_named(group.last_kind, group.last_purpose)} number {number} on the {group.describe()}"
                )
                text = (
                    f"rank {group.global_rank} has been waiting for {waited:.0f} s in {what} (time-out "
                    f"{group.timeout.total_seconds():g} s):\n" + "\n".join(missing)
                )
                group.last_wait = (number, text)
                sys.stderr.write(text + "\n")
                sys.stderr.flush()

    def _run(self) -> None:
        try:
            while True:
                self.publish()
                self._tell_of_long_waits()
                if self._stopped.wait(PERIOD_SECONDS):
                    return
        except Exception as error:
            # The store is gone, most often because the job is ending: told by who_is_missing if anybody asks, and not here,
            # where it would only add noise to the end of every job.
            self.error = error


def said_before(group: ProcessGroup) -> str:
    """What was said of a long wait that this rank was in a moment ago; "" if nothing.

    Where the device waits, as in the barriers of peers, its time-out is an error of the device that names nobody, and comes out at
    whatever the host asks next, such as the launch that follows.
    """
    number, text = group.last_wait
    return text if group.num_launches - number <= 1 else ""


def who_is_missing(group: ProcessGroup) -> str:
    """One line per rank of the group that has not come to the launch that this rank is in, for an error message.

    Takes three publishing periods. Communication: reads of the key-value store only.
    """
    from hp_platform import _process

    world = _process.state.world
    publisher = world.tables.diagnosis if world is not None and world.tables is not None else None
    if publisher is not None and publisher.error is not None:
        return f"the key-value store does not answer ({publisher.error}): most likely rank 0, which holds it, is gone"
    if publisher is None:
        return "no progress of the other ranks is known (the group has no key-value store)"
    try:
        publisher.publish()
        before = {rank: publisher.read(rank) for rank in group.ranks}
        time.sleep(3 * PERIOD_SECONDS)
        after = {rank: publisher.read(rank) for rank in group.ranks}
    except Exception as error:
        return f"the key-value store does not answer ({error}): most likely rank 0, which holds it, is gone"
    return "\n".join(_missing(group, after, before)) or (
        "every rank says that it has joined: the network or the device failed"
    )


def _missing(
    group: ProcessGroup,
    reports: Mapping[int, dict[str, Any] | None],
    before: Mapping[int, dict[str, Any] | None] | None,
) -> list[str]:
    """A line for every other rank that has not come; ``before``: what they had reported some periods earlier, if known."""
    lines = [
        _judge(group, rank, before[rank] if before is not None else None, reports[rank])
        for rank in group.ranks
        if rank != group.global_rank
    ]
    return [line for line in lines if line]


def _judge(
    group: ProcessGroup, rank: int, before: dict[str, Any] | None, after: dict[str, Any] | None
) -> str:
    if after is None:
        return f"rank {rank} has never reported: it did not start, or died at once"
    gone = before is not None and before["beat"] == after["beat"]
    number, kind, purpose = after["groups"].get(_key(group), (0, "", ""))
    # Only of one whose heart beats the report is known to be new: another one may have started more since.
    did = "reported" if before is None or gone else "started"
    last = (
        f"the last it {did} on this group is {_named(kind, purpose)} number {number}"
        if number
        else f"it has {did} nothing on this group"
    )
    if gone:
        return f"rank {rank} no longer answers (its process is gone or stopped); {last}"
    if number < group.num_launches:
        return f"rank {rank} has not come: {last}"
    if number == group.num_launches and (kind, purpose) != (group.last_kind, group.last_purpose):
        theirs, own = _named(kind, purpose), _named(group.last_kind, group.last_purpose)
        return (
            f"rank {rank} is out of step: it called {theirs} where this rank called {own} (number {number})"
        )
    return ""


def _named(kind: str, purpose: str) -> str:
    return f"{kind} ({purpose})" if purpose else kind


def _key(group: ProcessGroup) -> str:
    return ",".join(map(str, group.ranks))
