"""Workers that are forked from a process which has imported the framework already.

[Note: forked workers] To import a framework takes seconds of a core, and a run of tests on a small machine starts some hundred
workers. So a backend may name modules that a server imports once, and its workers are forked from that one: they have no
thread and no device yet, as if they had imported it themselves. What they would read from the environment while importing is
that of the server, so there is one for every environment but for what tells ranks apart. And there are two of each, for even
and for odd ranks: strings have other hashes in each, as in processes of their own, so that a loop over a set of names, which
lets the ranks of a job disagree, is found by a test.

:func:`hp_platform.launch.spawn` forks nothing: a user's process may have threads and devices.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from hp_platform.launch._child import FreshChild, python_command
from hp_platform.launch._environment import LAUNCH_VARIABLES
from hp_platform.testing._fork_client import ForkClient, ForkedChild

MAX_SERVERS = 4
"""That stay when nobody needs them: of two environments."""
OF_ONE_TEST = frozenset({"PYTEST_CURRENT_TEST"})
"""Variables that differ between any two starts, and that nobody reads while importing."""

_BOOTSTRAP = (
    "import sys; sys.path[:] = {path!r}; from hp_platform.testing._fork_loop import serve; "
    "serve({channel}, {parent}, {modules!r})()"
)


class ForkServers:
    """The servers of one process. Of more than ``max_servers`` the longest unused ends first, if none of its workers lives."""

    def __init__(self, max_servers: int = MAX_SERVERS) -> None:
        self._max_servers = max_servers
        self._servers: OrderedDict[tuple[object, ...], _Server] = OrderedDict()

    def start(
        self,
        modules: Sequence[str],
        env: Mapping[str, str],
        channels: tuple[int, int],
        output: int | None,
    ) -> ForkedChild:
        """A worker forked from a server that has imported ``modules``; see :class:`hp_platform.launch._child.Start`."""
        return self.client(modules, env, int(env["RANK"])).start(env, channels, output)

    def client(self, modules: Sequence[str], env: Mapping[str, str], rank: int) -> ForkClient:
        """To ask the server that has imported ``modules`` with the variables ``env``, for children that are this rank."""
        stays = LAUNCH_VARIABLES | OF_ONE_TEST
        common = {name: value for name, value in env.items() if name not in stays}
        key = (tuple(modules), rank % 2, tuple(sys.warnoptions), tuple(sorted(common.items())))
        server = self._servers.pop(key, None)
        if server is not None and not server.is_alive:
            server.close()
            server = None
        if server is None:
            self._make_room()
            server = _Server(modules, common)
        self._servers[key] = server
        return server.client

    def _make_room(self) -> None:
        idle = [key for key, server in self._servers.items() if server.client.is_idle]
        for key in idle[: max(0, len(self._servers) + 1 - self._max_servers)]:
            self._servers.pop(key).close()

    def close(self) -> None:
        """End the servers, and the workers that still run."""
        while self._servers:
            self._servers.popitem()[1].close()


class _Server:
    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = _BOOTSTRAP.format(
            path=sys.path, channel=theirs.fileno(), parent=os.getpid(), modules=tuple(modules)
        )
        with theirs:
            process = subprocess.Popen(
                python_command(program),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.client = ForkClient(ours)
        self._process = FreshChild(process)

    @property
    def is_alive(self) -> bool:
        return self._process.exit_code() is None

    def close(self) -> None:
        self.client.close()
        self._process.reap()
