"""The worker's side: wait for a call, run it, send back its result or its failure.

Messages are tuples (kind, payload). The parent sends ``call`` and ``exit``; the worker sends ``ready``, ``result`` and
``failure``.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from hp_platform import _process
from hp_platform.launch._errors import Failure
from hp_platform.launch._transport import dumps, loads

STACKS_SIGNAL = signal.SIGUSR1
"""Makes a worker write the stacks of all its threads into its file, whatever it is doing."""
SUMMARY_LENGTH = 300
_PR_SET_PDEATHSIG = 1


def main(connection: Connection, control_fd: int, boot: dict[str, Any]) -> NoReturn:
    """Serve until told to exit. ``boot`` is what :class:`WorkerProcess` has sent first."""
    die_with(boot["parent_pid"])
    stacks = Path(boot["stacks_file"]).open("a")  # noqa: SIM115 - faulthandler writes to it until the process ends
    faulthandler.enable(file=stacks)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    sys.argv = boot["argv"]
    for descriptor in (connection.fileno(), control_fd):
        os.set_inheritable(descriptor, False)
    control = socket.socket(fileno=control_fd)
    threading.Thread(target=_answer_questions, args=(control,), name="hp-launch-control", daemon=True).start()
    connection.send(("ready", None))
    while True:
        try:
            kind, payload = connection.recv()
        except (EOFError, ConnectionError):
            leave(1)  # the parent is gone
        if kind == "exit":
            leave(0)
        connection.send(_run(boot["rank"], payload))


def leave(code: int) -> NoReturn:
    """End the process without the interpreter's shutdown.

    Communication backends own threads that the shutdown pulls the ground from under: they abort at that point now and then.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with(parent_pid: int) -> None:
    """Let the kernel kill this process when the parent (strictly: the parent's thread that started it) ends.

    The control channel notices that too, but a thread needs the interpreter's lock, which the main thread may hold.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _answer_questions(control: socket.socket) -> None:
    """Answer each byte with a line on what this rank's groups have started last; end the process when the parent is gone."""
    while control.recv(1):
        control.sendall((_progress() + "\n").encode())
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _progress() -> str:
    world = _process.state.world
    if world is None or world.tables is None:
        return ""
    busy = [group for group in list(world.tables.groups.values()) if group.num_launches > 0]
    return "; ".join(
        f"last collective: {g.last_kind} number {g.num_launches} on {g.describe()}" for g in busy
    )


def _run(rank: int, payload: bytes) -> tuple[str, Any]:
    __tracebackhide__ = True
    answer: tuple[str, Any]
    try:
        function, args, kwargs = loads(payload)
        answer = ("result", dumps(function(*args, **kwargs)))
    except BaseException as error:
        answer = ("failure", _describe(rank, error))
    sys.stdout.flush()
    sys.stderr.flush()
    return answer


def _describe(rank: int, error: BaseException) -> Failure:
    lines = str(error).strip().splitlines() or [""]
    kind = type(error).__qualname__
    summary = f"failed with {kind}: {lines[0]}" if lines[0] else f"failed with {kind}"
    return Failure(
        rank=rank,
        summary=summary[:SUMMARY_LENGTH],
        traceback="".join(traceback.format_exception(type(error), error, _visible(error.__traceback__))),
        time=time.monotonic(),
        is_consequence=_is_consequence(error),
    )


def _visible(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that is not ours on; ours say ``__tracebackhide__``, as for pytest."""
    first = frames
    while first is not None and "__tracebackhide__" in first.tb_frame.f_locals:
        first = first.tb_next
    return first or frames


def _is_consequence(error: BaseException | None) -> bool:
    """Whether a peer's end or absence caused this error, as far as its type or the backend's text tells."""
    platform = _process.state.platform
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, (ConnectionError, EOFError, TimeoutError)):
            return True
        if platform is not None and platform.is_timeout(error):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
