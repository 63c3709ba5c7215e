"""Run a function on several new processes: the launcher of scripts, notebooks and tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hp_platform.launch._environment import environment
from hp_platform.launch._group import DEFAULT_START_GRACE, WorkerGroup
from hp_platform.platform import get_platform


def spawn(
    fn: Callable[..., Any],
    num_processes: int,
    device: str | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    start_grace: float = DEFAULT_START_GRACE,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on ``num_processes`` new Python processes of this host; the results, by rank.

    ``fn`` may be anything callable, also a lambda or a function of a script or notebook: it travels by cloudpickle, and so
    do its arguments and results. The main module is not run again, so no ``if __name__ == "__main__"`` is needed. The
    processes are new (never forked). They get torchrun's variables (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
    ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``), so ``init_process_group()`` works in them as it does under
    torchrun; the platform of this process if it is decided; ``OMP_NUM_THREADS=1`` unless it is set; and ``env`` over all
    that. They share this process' standard streams but have no input.

    ``device``: the kind of device (``"cpu"``, ``"cuda"``, ``"npu"``) of which rank r makes number r modulo their count its
    current one; None leaves it to ``fn``. ``timeout``: seconds for ``fn`` to return on all ranks (None: no limit);
    ``start_grace``: seconds for a process to come up before that.

    When all ranks have returned the processes end without the interpreter's shutdown: functions registered with
    :mod:`atexit` do not run. When this process ends, in whatever way, they end too.

    Communication: none of its own but one pipe per process.

    Raises :class:`WorkerError` with the traceback of the rank that failed first, when one raises or dies; the others are
    ended, within 5 seconds, before it is raised. A lost connection or a time-out counts as first only if nothing else is
    reported within 2 seconds. Raises :class:`WorkerTimeoutError` with the stacks of those that are late, ValueError for a
    number of processes below 1, TypeError for an ``fn`` that cannot be called and for a device that is no name.
    """
    if not callable(fn):
        raise TypeError(f"spawn runs a function; it got {fn!r}, which cannot be called")
    if type(num_processes) is not int or num_processes < 1:
        raise ValueError(f"num_processes={num_processes!r}: give the number of processes to start, 1 or more")
    if device is not None and not isinstance(device, str):
        raise TypeError(
            f"device={device!r}: give the kind of device by its name, such as 'cpu'; what fn is called with goes into args= and kwargs="
        )
    with WorkerGroup(num_processes, env=env, start_grace=start_grace) as group:
        try:
            if device is not None:
                group.call(use_device, (device,), timeout=start_grace)
            return group.call(fn, args, kwargs, timeout=timeout)
        finally:
            group.discard()


def use_device(name: str) -> None:
    """Make the device of the kind ``name`` that belongs to this process' rank on its host the current one."""
    place = environment()
    handle = get_platform().device(name)
    handle.set_current((place.local_rank if place is not None else 0) % handle.count())
