"""The side that asks a fork server; see :mod:`hp_platform.testing.fork_server`."""

from __future__ import annotations

import pickle
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hp_platform.testing._fork_loop import MAX_BYTES, work

SECONDS = 180.0
"""How long a server may take to answer; the first time it imports the framework before."""


class ForkClient:
    """One end of the channel whose other end a :class:`~hp_platform.testing._fork_loop.ForkLoop` serves."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._children: set[int] = set()
        self._codes: dict[int, int] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no child runs, or has not been reaped."""
        return not self._children

    def start(self, env: Mapping[str, str], channels: tuple[int, int], output: int | None) -> ForkedChild:
        """A worker; see :class:`hp_platform.launch._child.Start`."""
        return self.fork(work, (dict(env),), [*channels, *([] if output is None else [output])])

    def fork(
        self, task: Callable[..., Any], arguments: Sequence[Any], descriptors: Sequence[int]
    ) -> ForkedChild:
        """A child that does ``task(descriptors, *arguments)``, a function of a module."""
        self._channel.settimeout(SECONDS)
        socket.send_fds(self._channel, [pickle.dumps((task, tuple(arguments)))], descriptors)
        while True:
            kind, pid, value = self._receive()
            if kind == "started":
                self._children.add(pid)
                return ForkedChild(self, pid, value)
            self._codes[pid] = value

    def exit_code(self, pid: int) -> int | None:
        """Of a child; None while it runs."""
        self._channel.setblocking(False)
        while pid not in self._codes:
            try:
                _, ended, code = self._receive()
            except BlockingIOError:
                return None
            except ConnectionError:
                return -signal.SIGKILL  # the server is gone, and took its children along
            self._codes[ended] = code
        return self._codes[pid]

    def reap(self, pid: int) -> None:
        """Give back the id of a child that has ended; it is forgotten."""
        self._children.discard(pid)
        if self._codes.pop(pid, None) is not None:
            self._channel.send(pickle.dumps((None, pid)))

    def close(self) -> None:
        """End the server, with its children."""
        self._channel.close()

    def _receive(self) -> tuple[str, int, int]:
        packet = self._channel.recv(MAX_BYTES)
        if not packet:
            raise ConnectionResetError("the process that forks workers has ended; see the standard error")
        found: tuple[str, int, int] = pickle.loads(packet)
        return found


class ForkedChild:
    """See :class:`hp_platform.launch._child.Child`."""

    def __init__(self, client: ForkClient, pid: int, parent_pid: int) -> None:
        self._client = client
        self.pid = pid
        self.parent_pid = parent_pid
        self._code: int | None = None

    @property
    def is_reaped(self) -> bool:
        """See :class:`hp_platform.launch._child.Child`."""
        return self._code is not None

    def exit_code(self) -> int | None:
        """See :class:`hp_platform.launch._child.Child`."""
        return self._client.exit_code(self.pid) if self._code is None else self._code

    def reap(self) -> None:
        """See :class:`hp_platform.launch._child.Child`."""
        if self._code is not None:
            return
        while (code := self._client.exit_code(self.pid)) is None:
            time.sleep(0.005)
        self._code = code
        self._client.reap(self.pid)
