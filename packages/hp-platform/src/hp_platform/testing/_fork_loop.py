"""In a fork server (see :mod:`hp_platform.testing.fork_server`): fork a child per request, and report how it ended.

Requests and reports are pickled tuples, one per packet. ``(task, arguments)`` with the descriptors that the task takes is
answered with ``("started", pid, own pid)``; ``(None, pid)`` gives a child's id back; ``("ended", pid, code)`` comes when a child
has ended.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from hp_platform.launch._child import code_of
from hp_platform.launch._worker import die_with, leave, main

MAX_BYTES = 1 << 20
MAX_DESCRIPTORS = 3


def serve(channel_fd: int, parent_pid: int, modules: Sequence[str]) -> Callable[[], Any]:
    """Import ``modules``, then answer requests until the channel ends, and this process with it. In a child that was forked: what it
    has to do.
    """
    die_with(parent_pid)
    for name in modules:
        with suppress(ImportError):  # a worker that needs it fails in its own import, and says so
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the children's collections need not look at it, nor copy its pages
    return ForkLoop(socket.socket(fileno=channel_fd)).run()


class ForkLoop:
    """Answers the requests of one channel. Its process has no thread but this one."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._children: set[int] = set()
        self._ended: set[int] = set()
        self._wake, self._wakes = socket.socketpair()
        for end in (self._wake, self._wakes):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)

    def run(self) -> Callable[[], Any]:
        """Does not return but in a child: what it has to do."""
        while True:
            ready, _, _ = select.select([self._channel, self._wake], [], [])
            if self._wake in ready:
                self._wake.recv(4096)
                self._report()
            if self._channel in ready:
                task = self._answer()
                if task is not None:
                    return task

    def _answer(self) -> Callable[[], Any] | None:
        packet, descriptors, _, _ = socket.recv_fds(self._channel, MAX_BYTES, MAX_DESCRIPTORS)
        if not packet:
            self._end()
        task, value = pickle.loads(packet)
        if task is None:
            os.waitpid(value, 0)
            self._children.discard(value)
            self._ended.discard(value)
            return None
        pid = os.fork()
        if pid == 0:
            self._leave_to_child()
            return partial(task, descriptors, *value)
        self._children.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        self._send("started", pid, os.getpid())
        return None

    def _report(self) -> None:
        for pid in self._children - self._ended:
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                self._ended.add(pid)
                self._send("ended", pid, code_of(found))

    def _send(self, *report: Any) -> None:
        with suppress(ConnectionError):  # nobody is left: the channel says so next
            self._channel.send(pickle.dumps(report))

    def _end(self) -> NoReturn:
        """Nobody is left to ask: end the children with all that they have started."""
        for pid in self._children:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        leave(0)

    def _leave_to_child(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._channel, self._wake, self._wakes):
            end.close()
        os.setsid()
        if "numpy.random" in sys.modules:  # Python's own generator is seeded anew by itself
            sys.modules["numpy.random"].seed()


def work(descriptors: Sequence[int], variables: Mapping[str, str]) -> None:
    """In a child: what a fresh worker does. ``descriptors``: its ends of the calls and of the control channel, and its output if that is
    another than this process'.
    """
    calls, control, *outputs = descriptors
    begin(variables, outputs * 2)
    connection = Connection(calls)
    boot = connection.recv()
    sys.path[:] = boot["sys_path"]
    main(connection, control, boot)


def begin(variables: Mapping[str, str], outputs: Sequence[int]) -> None:
    """In a child: its variables, and where its standard output and error go (none: where this process' own go)."""
    os.environ.clear()
    os.environ.update(variables)
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
    for output in set(outputs):
        os.close(output)
