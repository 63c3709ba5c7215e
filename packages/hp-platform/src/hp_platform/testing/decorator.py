"""``@distributed``: on which backends and how many ranks a test runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from hp_platform.testing.backends import BACKENDS, PLAIN, Backend, Selection, known

DEFAULT_TIMEOUT = 60.0
_TAG = "__hp_distributed__"
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Distributed:
    """What the decorator leaves at the test function."""

    world_sizes: tuple[int, ...]
    backends: tuple[str, ...]
    timeout: float
    min_world_size: int
    init: bool
    isolated: bool


@dataclass(frozen=True)
class Case:
    """One backend and size of a test: the value of its hidden parameter."""

    backend: str
    world_size: int
    absence: str = ""
    """Why it cannot run here; empty if it can."""

    @property
    def id(self) -> str:
        """The part of the test's id, such as ``torch-w2``."""
        return f"{self.backend}-w{self.world_size}"


def distributed(
    world_size: int | Sequence[int] = 2,
    *,
    backends: str | Sequence[str] | None = None,
    timeout: float | None = None,
    min_world_size: int | None = None,
    init: bool = True,
    isolated: bool = False,
) -> Callable[[_Function], _Function]:
    """Run the test function on every rank of a world, once for each backend of the run and each size.

    The function takes ordinary pytest parameters and fixtures, whose values are made in the pytest process and must be
    picklable, and optionally ``world``, a :class:`hp_platform.testing.World`. Its module is imported in the workers under
    the name and with the ``sys.path`` that it has in the pytest process, so a helper module can be imported by both or by
    none (use pytest's ``pythonpath``). Inside of the function hypothesis needs ``derandomize=True, database=None``, so that
    all ranks draw the same examples.

    Args:
        world_size: number of ranks, or several. On npu and mindspore sizes above 2 become 2, for time's sake; on cuda
            sizes above the number of devices (times ``HP_TEST_RANKS_PER_DEVICE``) are skipped.
        backends: of ``torch`` (cpu, gloo), ``cuda`` (nccl), ``npu`` (hccl), ``mindspore`` (cpu, mccl); None: all four; or
            ``plain``: processes without framework and world.
        timeout: seconds for the function on all ranks (times ``HP_TEST_TIMEOUT_SCALE``); default 60.
        min_world_size: with fewer ranks the test has no meaning; npu and mindspore run it with as many.
        init: whether the default process group is initialised; False: the test does so itself (implies ``isolated``).
        isolated: whether the workers start for this test alone and are thrown away after it, without a look whether the
            ranks are still in step: for tests that break their world on purpose.

    The first failing rank's traceback is the test's error. A test that passes but leaves the ranks out of step fails.
    ValueError for sizes below 1, unknown backends, and a time limit that is not positive.
    """
    if callable(world_size):
        raise ValueError("distributed has arguments: write @distributed() with parentheses")
    sizes = _sizes(world_size)
    names = (
        tuple(BACKENDS) if backends is None else (backends,) if isinstance(backends, str) else tuple(backends)
    )
    for name in names:
        known(name)
    if not names:
        raise ValueError("backends=() runs nowhere: name backends, or leave it out for all")
    if timeout is not None and timeout <= 0:
        raise ValueError(f"timeout={timeout!r}: give the test a positive number of seconds")
    least = 1 if min_world_size is None else min_world_size
    if least > min(sizes):
        raise ValueError(f"world_size={world_size!r} has sizes below min_world_size={least}: leave them out")
    tag = Distributed(
        world_sizes=sizes,
        backends=names,
        timeout=DEFAULT_TIMEOUT if timeout is None else float(timeout),
        min_world_size=least,
        init=init,
        isolated=isolated or not init,
    )

    def mark(function: _Function) -> _Function:
        if isinstance(function, type):
            raise ValueError(
                f"@distributed marks test functions and methods; it got {function!r}: mark its methods instead"
            )
        setattr(function, _TAG, tag)
        # The plugin's fixture of this name carries the case, also for functions that do not take it.
        return pytest.mark.usefixtures("world")(function)

    return mark


def tag_of(function: Any) -> Distributed | None:
    """What the decorator has left at a function; None if it is an ordinary one."""
    return getattr(function, _TAG, None)


def cases(tag: Distributed, selection: Selection) -> list[Case]:
    """The cases of a test in a run. If none of its backends runs, one that says so."""
    found: dict[Case, None] = {}
    for name in tag.backends:
        backend = known(name)
        if name in selection.absent:
            if name in selection.named:
                found[Case(name, tag.world_sizes[0], selection.absent[name])] = None
        elif backend is PLAIN or name in selection.running:
            found.update((_case(tag, backend, size, selection), None) for size in tag.world_sizes)
    if not found:
        running = ", ".join(selection.running) or "none"
        reason = f"runs on {', '.join(tag.backends)} only; the backends of this run are: {running}"
        return [Case(tag.backends[0], tag.world_sizes[0], reason)]
    return list(found)


def _case(tag: Distributed, backend: Backend, size: int, selection: Selection) -> Case:
    if backend.usual_max_size is not None:
        size = min(size, max(backend.usual_max_size, tag.min_world_size))
    # Emulated devices are as many as the emulation is told; real ones are what there is.
    most = selection.max_size(backend)
    lacking = (
        f"{size} ranks need {-(-size // selection.ranks_on_each(backend))} devices, and there are {selection.devices[backend.name]}"
        if most is not None and size > most
        else ""
    )
    return Case(backend.name, size, lacking)


def _sizes(given: Any) -> tuple[int, ...]:
    sizes = (given,) if isinstance(given, int) else tuple(given)
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"world_size={given!r}: give a number of ranks, 1 or more, or several of them")
    return tuple(dict.fromkeys(sizes))
