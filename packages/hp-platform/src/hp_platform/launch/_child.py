"""A worker's process as its parent sees it, and the usual way to start one: a fresh Python."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Protocol

_BOOTSTRAP = (
    "import sys; from multiprocessing.connection import Connection; c = Connection(int(sys.argv[1])); b = c.recv(); "
    "sys.path[:] = b['sys_path']; from hp_platform.launch._worker import main; main(c, int(sys.argv[2]), b)"
)


class Child(Protocol):
    """A process that leads its own session, and so its own process group."""

    pid: int
    parent_pid: int
    """Whose end is its end: this process, or the one that has forked it for this one."""

    @property
    def is_reaped(self) -> bool:
        """Whether its id has been given back."""

    def exit_code(self) -> int | None:
        """None while it runs; else its code, negative for a signal. The process stays unreaped, so its group's id stays ours."""

    def reap(self) -> None:
        """Wait until it has ended, and give its id back."""


class Start(Protocol):
    """A way to start a worker."""

    def __call__(self, env: Mapping[str, str], channels: tuple[int, int], output: int | None) -> Child:
        """Start a process with the variables ``env`` that serves ``channels``: the descriptors of its ends of the calls and of the
        control channel. ``output``: where its standard streams go; None: where this process' own go.
        """


class FreshChild:
    """A new interpreter."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        self.parent_pid = os.getpid()

    @property
    def is_reaped(self) -> bool:
        """See :class:`Child`."""
        return self._process.returncode is not None

    def exit_code(self) -> int | None:
        """See :class:`Child`."""
        if self._process.returncode is not None:
            return self._process.returncode
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return self._process.wait()  # somebody else has reaped it: Popen knows what to say then
        return None if found is None else code_of(found)

    def reap(self) -> None:
        """See :class:`Child`."""
        self._process.wait()


def start_fresh(env: Mapping[str, str], channels: tuple[int, int], output: int | None) -> FreshChild:
    """See :class:`Start`."""
    process = subprocess.Popen(
        python_command(_BOOTSTRAP, *map(str, channels)),
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=channels,
        start_new_session=True,
    )
    return FreshChild(process)


def python_command(program: str, *arguments: str) -> list[str]:
    """What runs ``program`` in an interpreter like this one: with its warnings, and output that is not held back."""
    return [sys.executable, *(f"-W{option}" for option in sys.warnoptions), "-u", "-c", program, *arguments]


def code_of(found: os.waitid_result) -> int:
    """The exit code of a process that has ended, negative for a signal."""
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
