"""The parent's side of one worker: talk to it, learn how it ended, look at its stacks, end it."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hp_platform.launch._child import Child, Start
from hp_platform.launch._errors import Failure
from hp_platform.launch._worker import STACKS_SIGNAL

TERMINATE_SECONDS = 1.0
"""Between the polite signal and the other one."""
STACKS_SECONDS = 2.0
"""How long to wait for a worker to write its stacks."""
OWN_THREADS = ("in _answer_questions", "hp_platform/diagnosis.py")
"""What the stacks of the library's own background threads contain; they say nothing about a hang."""
OWN_FRAME = "hp_platform/launch/_worker.py"


class WorkerProcess:
    """A Python process that runs what it is sent. It leads its own process group, so that its children end with it."""

    def __init__(
        self, rank: int, env: Mapping[str, str], folder: Path, *, capture: bool, start: Start
    ) -> None:
        self.rank = rank
        self.output_file = folder / f"rank{rank}.output"
        self._stacks_file = folder / f"rank{rank}.stacks"
        ours, theirs = socket.socketpair()
        self._control, their_control = socket.socketpair()
        with theirs, their_control:
            output = self.output_file.open("ab") if capture else None
            try:
                self.child: Child = start(
                    env,
                    (theirs.fileno(), their_control.fileno()),
                    None if output is None else output.fileno(),
                )
            finally:
                if output is not None:
                    output.close()
        self.connection: Connection = Connection(ours.detach())
        self.send(
            {
                "rank": rank,
                "parent_pid": self.child.parent_pid,
                "sys_path": list(sys.path),
                "argv": list(sys.argv),
                "stacks_file": str(self._stacks_file),
            }
        )

    @property
    def pid(self) -> int:
        """The process, and the process group, of the worker."""
        return self.child.pid

    def send(self, message: Any) -> None:
        """Give the worker a message; a dead worker takes none, which whoever waits for its answer learns then."""
        try:
            self.connection.send(message)
        except ConnectionError:
            self.wait(TERMINATE_SECONDS)

    def exit_code(self) -> int | None:
        """None while it runs; else its code, negative for a signal."""
        return self.child.exit_code()

    def wait(self, seconds: float) -> bool:
        """Whether it ends within that time."""
        deadline = time.monotonic() + seconds
        while self.exit_code() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def death(self) -> Failure:
        """How it ended without an answer."""
        code = self.exit_code()
        if code is None:
            summary = "closed its channel to the parent process"
        elif code < 0:
            summary = f"was killed by signal {-code} ({_signal_name(-code)})"
        else:
            summary = f"exited with code {code} before it had returned"
        return Failure(
            rank=self.rank,
            summary=summary,
            traceback=self._read_stacks(),
            time=time.monotonic(),
            # Watchdogs of communication backends abort the process when a peer is gone.
            is_consequence=code == -signal.SIGABRT,
        )

    def request_stacks(self) -> None:
        """Ask for the stacks of all threads; :meth:`stacks` reads them."""
        self._stacks_file.write_text("")
        if self.exit_code() is None:
            os.kill(self.pid, STACKS_SIGNAL)

    def stacks(self, deadline: float) -> str:
        """The stacks that the worker has written since :meth:`request_stacks`, after the collective that it started last.

        ``deadline`` of the monotonic clock: how long to wait for them.
        """
        text = ""
        while time.monotonic() < deadline:
            before, text = text, self._read_stacks()
            if text and text == before:
                break
            time.sleep(0.05)
        return "\n".join(
            filter(None, (self._progress(deadline), text or "it does not even write its stacks"))
        )

    def _progress(self, deadline: float) -> str:
        self._control.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            self._control.sendall(b"?")
            return self._control.recv(1 << 16).decode().strip()
        except (TimeoutError, ConnectionError):
            return (
                "it does not answer: its main thread holds the interpreter's lock, or the process is stopped"
            )

    def _read_stacks(self) -> str:
        text = self._stacks_file.read_text(errors="replace") if self._stacks_file.exists() else ""
        threads = [
            # Below our own frame there is only what started it.
            "\n".join(itertools.takewhile(lambda line: OWN_FRAME not in line, thread.splitlines()))
            for thread in text.strip().split("\n\n")
            if not any(own in thread for own in OWN_THREADS)
        ]
        return "\n\n".join(threads)


def end_all(workers: Iterable[WorkerProcess]) -> None:
    """End the workers and all their children: ask, then kill. Returns when they are gone."""
    workers = [worker for worker in workers if not worker.child.is_reaped]
    for worker in workers:
        _signal_group(worker, signal.SIGTERM)
    deadline = time.monotonic() + TERMINATE_SECONDS
    for worker in workers:
        worker.wait(max(0.0, deadline - time.monotonic()))
    for worker in workers:
        _signal_group(worker, signal.SIGKILL)
    for worker in workers:
        worker.child.reap()
        worker.connection.close()
        worker._control.close()


def _signal_group(worker: WorkerProcess, number: signal.Signals) -> None:
    try:
        os.killpg(worker.pid, number)
    except ProcessLookupError:
        return  # nobody is left


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unnamed"
