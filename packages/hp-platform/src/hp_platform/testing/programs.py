"""Running a Python program as ``python <arguments>`` does, in a process that has imported its framework already.

The program's own workers (:func:`hp_platform.launch.spawn`) are forked too, from a copy of the program's process that was made before
it began. See [Note: forked workers] in :mod:`hp_platform.testing.fork_server`; here strings have the same hashes on all ranks.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from hp_platform import _process
from hp_platform.launch._worker import die_with, leave
from hp_platform.testing._fork_client import ForkClient
from hp_platform.testing._fork_loop import ForkLoop, begin
from hp_platform.testing.backends import known
from hp_platform.testing.fork_server import ForkServers


class Programs:
    """What runs them; the fixture ``programs`` of the plugin."""

    def __init__(self, servers: ForkServers) -> None:
        self._servers = servers

    def run(
        self, backend: str, arguments: Sequence[str | Path], *, cwd: Path, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """``python <arguments>`` in the folder ``cwd``, on one thread; ``arguments`` begin with a file, or with ``-m`` and a module.

        What it printed is captured. Where workers of ``backend`` are not forked, the program is not, either. subprocess.TimeoutExpired
        after ``timeout`` seconds; then it is ended.
        """
        arguments = [str(argument) for argument in arguments]
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        modules = known(backend).before_fork(os.environ)
        if not modules:
            return subprocess.run(
                [sys.executable, *arguments],
                cwd=cwd,
                env=variables,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        client = self._servers.client(modules, {**variables, **known(backend).environment}, rank=0)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            outputs = [out.fileno(), err.fileno()]
            child = client.fork(_run, (variables, str(cwd), arguments), outputs)
            deadline = time.monotonic() + timeout
            while child.exit_code() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            code = child.exit_code()
            if code is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.reap()
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read())
        if code is None:
            raise subprocess.TimeoutExpired(arguments, timeout, *texts)
        return subprocess.CompletedProcess(arguments, code, *texts)


def _run(
    descriptors: Sequence[int], variables: Mapping[str, str], cwd: str, arguments: Sequence[str]
) -> None:
    begin(variables, descriptors)
    os.chdir(cwd)
    _process.start_of_workers.set(_server_of_this_state().start)
    if arguments[0] == "-m":
        sys.argv = [*arguments[1:]]
        sys.path.insert(0, cwd)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*arguments]
        sys.path.insert(0, str(Path(arguments[0]).absolute().parent))
        runpy.run_path(arguments[0], run_name="__main__")


def _server_of_this_state() -> ForkClient:
    """Who asks a copy of this process to fork workers from what it was. It ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        try:
            ours.close()
            die_with(parent)
            ForkLoop(theirs).run()()
        except BaseException:
            traceback.print_exc()
        leave(1)
    theirs.close()
    return ForkClient(ours)
