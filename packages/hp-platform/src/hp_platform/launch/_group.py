"""A group of workers that run the same call: what :func:`spawn` and the pools of the test harness stand on."""

from __future__ import annotations

import multiprocessing.connection
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hp_platform import _process
from hp_platform.launch._child import Start, start_fresh
from hp_platform.launch._environment import DEFAULT_ADDRESS, LAUNCH_VARIABLES
from hp_platform.launch._errors import (
    SETTLE_CONSEQUENCE_SECONDS,
    SETTLE_SECONDS,
    Failure,
    WorkerTimeoutError,
    worker_error,
)
from hp_platform.launch._ports import ReservedPorts, reserve_ports
from hp_platform.launch._transport import dumps, loads
from hp_platform.launch._worker_process import STACKS_SECONDS, WorkerProcess, end_all
from hp_platform.platform import ENVIRONMENT_VARIABLE

TICK_SECONDS = 0.05
"""How often a wait looks whether a worker has died; answers are noticed at once."""
LEAVE_SECONDS = 5.0
DEFAULT_START_GRACE = 120.0


class WorkerGroup:
    """``num_processes`` new Python processes with torchrun's variables; rank i is the i-th.

    Belongs to the thread that made it. Any failure ends all of them; a group is not used again after that.

    ``env`` is laid over the variables of this process. With ``capture`` the workers' standard streams go into files that
    :meth:`output` reads, else they are this process' own. ``start_grace`` is the time in seconds that a process may take
    until it is up; ``start`` is how it is started (None: as a fresh Python, unless the harness runs the program).
    """

    def __init__(
        self,
        num_processes: int,
        *,
        env: Mapping[str, str] | None = None,
        capture: bool = False,
        start_grace: float = DEFAULT_START_GRACE,
        start: Start | None = None,
    ) -> None:
        self._ports = reserve_ports()
        self._folder = tempfile.TemporaryDirectory(prefix="hp-launch-")
        self._workers: list[WorkerProcess] = []
        self.is_alive = True
        try:
            start = start or _process.start_of_workers.get() or start_fresh
            common = _common_environment(num_processes, self._ports, env or {})
            for rank in range(num_processes):
                variables = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                folder = Path(self._folder.name)
                self._workers.append(WorkerProcess(rank, variables, folder, capture=capture, start=start))
            self._collect("start", start_grace)
        except BaseException:
            self.kill()
            self.discard()
            raise

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.kill()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [worker.pid for worker in self._workers]

    def call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        """Run ``function(*args, **kwargs)`` on every rank; the results by rank. Function and values travel by cloudpickle.

        If a rank fails or dies, or not all return within ``timeout`` seconds (None: no limit), all workers are ended and
        :class:`WorkerError` (:class:`WorkerTimeoutError`) is raised.
        """
        payload = dumps((function, tuple(args), dict(kwargs or {})))
        try:
            for worker in self._workers:
                worker.send(("call", payload))
            return [loads(result) for result in self._collect("finish", timeout)]
        except BaseException:  # KeyboardInterrupt above all
            self.kill()
            raise

    def output(self, rank: int) -> str:
        """What the rank has written to its standard streams since :meth:`clear_output`; empty without ``capture``."""
        file = self._workers[rank].output_file
        return file.read_text(errors="replace") if file.exists() else ""

    def clear_output(self) -> None:
        """Forget what was written until now."""
        for worker in self._workers:
            if worker.output_file.exists():
                os.truncate(worker.output_file, 0)

    def close(self) -> None:
        """Let all workers leave; rank 0 last, because it may hold what the others still talk to. Ends those that do not."""
        for worker in reversed(self._workers):
            worker.send(("exit", None))
        deadline = time.monotonic() + LEAVE_SECONDS
        for worker in self._workers:
            worker.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End all workers and their children, now. What they wrote can still be read; :meth:`discard` forgets that too."""
        self.is_alive = False
        end_all(self._workers)
        self._ports.release()

    def discard(self) -> None:
        """Remove the files with the workers' output."""
        self._folder.cleanup()

    def _collect(self, verb: str, timeout: float | None) -> list[Any]:
        """Wait until every worker has answered; the answers by rank."""
        started = time.monotonic()
        answers: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        settle_at = float("inf")
        waiting = {worker.connection: worker for worker in self._workers}
        while waiting and time.monotonic() < settle_at:
            if not failures and timeout is not None and time.monotonic() > started + timeout:
                raise _timeout_error(list(waiting.values()), list(answers), verb, timeout)
            ready = multiprocessing.connection.wait(list(waiting), TICK_SECONDS)
            for connection, worker in list(waiting.items()):
                if connection not in ready and (worker.exit_code() is None or connection.poll()):
                    continue
                del waiting[connection]
                kind, answer = _receive(worker)
                if kind != "failure":
                    answers[worker.rank] = answer
                    continue
                failures[worker.rank] = answer
                patience = SETTLE_CONSEQUENCE_SECONDS if answer.is_consequence else SETTLE_SECONDS
                settle_at = min(settle_at, time.monotonic() + patience)
        if failures:
            raise worker_error(list(failures.values()), len(self._workers), list(answers))
        return [answers[rank] for rank in range(len(self._workers))]


def _receive(worker: WorkerProcess) -> tuple[str, Any]:
    try:
        kind, answer = worker.connection.recv()
    except (EOFError, OSError):  # it is gone, perhaps in the middle of a message
        worker.wait(1.0)
        return "failure", worker.death()
    return kind, answer


def _timeout_error(
    late: Sequence[WorkerProcess], returned: Sequence[int], verb: str, seconds: float
) -> WorkerTimeoutError:
    for worker in late:
        worker.request_stacks()
    deadline = time.monotonic() + STACKS_SECONDS
    stacks = {worker.rank: worker.stacks(deadline) for worker in late}
    names = ", ".join(map(str, stacks))
    total = len(late) + len(returned)
    lines = [
        f"{'rank' if len(late) == 1 else 'ranks'} {names} of {total} did not {verb} within {seconds:g} s"
    ]
    for rank, text in stacks.items():
        lines.extend(["", f"rank {rank}:", text])
    if returned:
        lines.extend(["", "other ranks:", *(f"  rank {rank} had returned" for rank in sorted(returned))])
    return WorkerTimeoutError("\n".join(lines), rank=late[0].rank, traceback=stacks[late[0].rank])


def _common_environment(num_processes: int, ports: ReservedPorts, env: Mapping[str, str]) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    variables.setdefault("OMP_NUM_THREADS", "1")  # the processes share the cores, as torchrun does it
    if _process.state.platform is not None:
        variables[ENVIRONMENT_VARIABLE] = _process.state.platform.platform_type.value
    return {
        **variables,
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": DEFAULT_ADDRESS,
        "MASTER_PORT": str(ports.first),
        **env,
    }
