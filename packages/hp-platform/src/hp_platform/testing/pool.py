"""Pools of workers: started once per backend and size, used by one test after the other, thrown away at the first doubt."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from hp_platform.launch import WorkerError
from hp_platform.launch._child import Start, start_fresh
from hp_platform.launch._group import WorkerGroup
from hp_platform.testing._remote import Outcome, TestCall, meet, prepare, run_test
from hp_platform.testing.backends import PLAIN, known
from hp_platform.testing.fork_server import ForkServers
from hp_platform.testing.strictness import Filters

MAX_IDLE = 4
"""Pools that stay alive between tests: the sizes 1 to 4 of one backend, which most files go through one after the other. With
one less, each would be ended just before its turn comes again, and most of a run would be starts. No more than that, for a
small machine's memory: a worker holds 0.2 GB."""
START_SECONDS = 180.0
COLLECTIVE_SECONDS = 30.0
"""How long a collective waits for its peers; below a test's limit, so that its own error comes first and names who is missing."""
MEET_SECONDS = 20.0


class TestFailedError(Exception):
    """A test failed on a pool, which is gone. ``outputs`` are the ranks' captured streams."""

    __test__ = False

    def __init__(self, message: str, outputs: Sequence[str]) -> None:
        super().__init__(message)
        self.outputs = tuple(outputs)


class Pool:
    """Workers of one backend and size that have joined one world.

    ``scale`` multiplies all time limits; ``servers`` fork the workers of backends that allow it (None: all are fresh Pythons).
    TestFailedError if they do not start.
    """

    def __init__(
        self,
        backend: str,
        size: int,
        *,
        init: bool,
        filters: Filters,
        scale: float = 1.0,
        servers: ForkServers | None = None,
    ) -> None:
        self.backend = known(backend)
        self.size = size
        self.has_world = init and self.backend is not PLAIN
        self._scale = scale
        self._num_meetings = 0
        try:
            self._group = WorkerGroup(
                size,
                env=self.backend.environment,
                capture=True,
                start_grace=START_SECONDS * scale,
                start=self._way_to_start(servers),
            )
        except WorkerError as error:
            raise TestFailedError(
                f"a pool of {size} workers for {backend} does not start: {error}", ()
            ) from None
        limit = timedelta(seconds=COLLECTIVE_SECONDS * scale)
        try:
            self._group.call(prepare, (backend, init, limit, filters), timeout=START_SECONDS * scale)
            if self.has_world:
                # Backends make their connections at the first collective, which takes longer than others. A call of its own,
                # because they let some ranks out of the rendezvous seconds before the others.
                self._group.call(meet, (0,), timeout=START_SECONDS * scale)
        except WorkerError as error:
            outputs = self._end()
            raise TestFailedError(
                f"a pool of {size} workers for {backend} does not start: {error}", outputs
            ) from None
        except BaseException:
            self._end()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return self._group.pids

    @property
    def is_alive(self) -> bool:
        """Whether it can take a test."""
        return self._group.is_alive

    def run(self, call: TestCall, *, timeout: float, check_step: bool = True) -> Outcome:
        """Run a test on all ranks; how it ended. TestFailedError if it fails on any rank, hangs, or leaves the ranks out of step.

        ``timeout`` in seconds (times the scale). ``check_step``: see :meth:`_check_step`.
        """
        self._group.clear_output()
        try:
            outcomes = self._group.call(run_test, (call,), timeout=timeout * self._scale)
            self._agree(outcomes)
            if check_step:
                self._check_step(outcomes)
        except (WorkerError, _DisagreementError) as error:
            raise TestFailedError(str(error), self._end()) from None
        except BaseException:
            self._end()
            raise
        return outcomes[0]

    def close(self) -> None:
        """Let the workers leave."""
        if self._group.is_alive:
            self._group.close()
        self._group.discard()

    def _way_to_start(self, servers: ForkServers | None) -> Start:
        modules = self.backend.before_fork(os.environ)
        return partial(servers.start, modules) if servers is not None and modules else start_fresh

    def _end(self) -> list[str]:
        """Kill the workers; what they have written."""
        self._group.kill()
        outputs = [self._group.output(rank) for rank in range(self.size)]
        self._group.discard()
        return outputs

    def _agree(self, outcomes: Sequence[Outcome]) -> None:
        if len({outcome.kind for outcome in outcomes}) > 1:
            told = [
                f"rank {rank} {o.kind}{f' ({o.reason})' if o.reason else ''}"
                for rank, o in enumerate(outcomes)
            ]
            raise _DisagreementError(
                "the ranks do not agree how the test ends: "
                + ", ".join(told)
                + "; all must take the same decision"
            )

    def _check_step(self, outcomes: Sequence[Outcome]) -> None:
        """A test that leaves the ranks out of step is itself the failure, not its successor.

        Two looks: every group's members have started the same collectives, in the same order; and a collective on the world
        meets its own peers (what bypasses our collectives shows there).
        """
        complaints = _differences(outcomes)
        if complaints:
            raise _DisagreementError(
                "the test passed on every rank but left them out of step:\n" + "\n".join(complaints)
            )
        if not self.has_world:
            return
        self._num_meetings = self._num_meetings + 1
        try:
            answers = self._group.call(meet, (self._num_meetings,), timeout=MEET_SECONDS * self._scale)
        except WorkerError as error:
            raise _DisagreementError(
                f"the test passed on every rank but left them out of step: a collective after it failed\n{error}"
            ) from None
        if any(answer != [self._num_meetings] * self.size for answer in answers):
            raise _DisagreementError(
                "the test passed on every rank but left them out of step: a collective after it met one that the test had "
                f"started on some ranks only (expected {self._num_meetings} from all, the ranks got {answers})"
            )


class PoolCache:
    """The pools of a run; at most ``max_idle`` live, the longest unused goes first."""

    def __init__(self, *, scale: float = 1.0, max_idle: int = MAX_IDLE) -> None:
        self.scale = scale
        self.servers = ForkServers()
        self._max_idle = max_idle
        self._pools: OrderedDict[tuple[str, int], Pool] = OrderedDict()

    def get(self, backend: str, size: int, filters: Filters) -> Pool:
        """A living pool whose workers have joined a world."""
        key = (backend, size)
        pool = self._pools.pop(key, None)
        if pool is None or not pool.is_alive:
            while len(self._pools) >= self._max_idle:
                self._pools.popitem(last=False)[1].close()
            pool = Pool(backend, size, init=True, filters=filters, scale=self.scale, servers=self.servers)
        self._pools[key] = pool
        return pool

    def close(self) -> None:
        """End all pools, and the servers."""
        while self._pools:
            self._pools.popitem()[1].close()
        self.servers.close()


class _DisagreementError(Exception):
    """The ranks each went well, but not together."""


def _differences(outcomes: Sequence[Outcome]) -> list[str]:
    complaints = []
    for ranks in dict.fromkeys(ranks for outcome in outcomes for ranks in outcome.launches):
        started = {rank: outcomes[rank].launches.get(ranks, ()) for rank in ranks}
        first = started[ranks[0]]
        for rank, kinds in started.items():
            if kinds != first:
                at = next(
                    (i for i, (a, b) in enumerate(zip(first, kinds, strict=False)) if a != b),
                    min(len(first), len(kinds)),
                )
                complaints.append(
                    f"on the group of ranks {', '.join(map(str, ranks))}, collective number {at + 1} of the test is "
                    f"{_kind(first, at)} on rank {ranks[0]} and {_kind(kinds, at)} on rank {rank}"
                )
                break
    return complaints


def _kind(kinds: Sequence[str], index: int) -> str:
    return kinds[index] if index < len(kinds) else "missing"
