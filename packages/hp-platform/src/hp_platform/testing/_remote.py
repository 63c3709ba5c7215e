"""What a worker of a pool does: join the world once, run tests, show that it is still in step."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Mapping
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import timedelta

from hp_platform import _process, launch
from hp_platform.diagnosis import POINT_TO_POINT
from hp_platform.launch._spawn import use_device
from hp_platform.launch._transport import loads
from hp_platform.platform import get_platform
from hp_platform.recording import record_collectives
from hp_platform.testing._modules import resolve, test_module
from hp_platform.testing.backends import PLAIN, known, prepare_worker
from hp_platform.testing.strictness import Filters, strict
from hp_platform.testing.world import World

MANY_OBJECTS = 10_000
"""Among which a collection takes two milliseconds."""


@dataclass(frozen=True)
class TestCall:
    """One test for all ranks of a pool."""

    __test__ = False  # pytest must not take it for a test class

    path: str
    module: str
    """The module's name in the pytest process."""
    function: str
    """Name in the module; of a method with its classes, such as ``TestX.test_y``."""
    arguments: bytes
    """The keyword arguments, pickled; unpickled after the module is there, because they may need it."""
    sys_path: tuple[str, ...]
    backend: str
    filters: Filters


@dataclass(frozen=True)
class Outcome:
    """How a test that did not fail ended on one rank."""

    kind: str
    """``passed``, ``skipped`` or ``xfailed``."""
    reason: str = ""
    launches: Mapping[tuple[int, ...], tuple[str, ...]] = field(default_factory=dict)
    """Ranks of a group -> kinds of the collectives that this rank has started on it, in order, without point to point."""


def prepare(backend_name: str, init: bool, timeout: timedelta, filters: Filters) -> None:
    """Choose the device and, with ``init``, join the world, whose collectives wait ``timeout`` for their peers."""
    backend = known(backend_name)
    if backend is PLAIN:
        return
    with strict(filters):
        place = launch.environment()
        assert place is not None, "workers are started with torchrun's variables"
        prepare_worker(backend, place.rank)
        use_device(backend.device_type)
        if init:
            from hp_platform.process_groups import init_process_group

            device = get_platform().device(backend.device_type).current()
            init_process_group(timeout=timeout, device_id=device)
    gc.collect()
    _set_apart_what_stays()


def run_test(call: TestCall) -> Outcome:
    """Run the test function; its exceptions pass, but for a skip or an expected failure, which are outcomes."""
    __tracebackhide__ = True
    import pytest

    if sys.path != list(call.sys_path):
        sys.path[:] = call.sys_path
    with strict(call.filters), record_collectives() as record:
        function = resolve(test_module(call.path, call.module), call.function)
        arguments = loads(call.arguments)
        if "world" in inspect.signature(function).parameters:
            arguments["world"] = _world(call.backend)
        try:
            # What the test enters and does not leave (a current mesh, a mode) ends with its context.
            copy_context().run(function, **arguments)
        except pytest.skip.Exception as skip:
            kind, reason = "skipped", str(skip.msg)
        except pytest.xfail.Exception as expected:
            kind, reason = "xfailed", str(expected.msg)
        else:
            kind, reason = "passed", ""
    _set_apart_what_stays()
    launches: dict[tuple[int, ...], tuple[str, ...]] = {}
    for started in record.launches:
        if started.kind not in POINT_TO_POINT:
            ranks = started.group.ranks
            launches[ranks] = (*launches.get(ranks, ()), started.kind)
    return Outcome(kind, reason, launches)


def meet(number: int) -> list[int]:
    """The ``number`` that each rank came here with: one tiny all_gather on the world.

    A rank that has started one collective more or less than the others in the test before makes this one fail, wait in
    vain, or give other numbers. What the device still had to do, or to complain of, comes before it.
    """
    from hp_platform import collectives
    from hp_platform.process_groups import world_device

    platform = get_platform()
    platform.device(world_device()).synchronize()
    mine = platform.full((1,), number, platform.dtype("int64"), world_device())
    return [int(x) for x in platform.to_numpy(collectives.all_gather(mine))]


def _set_apart_what_stays() -> None:
    """Take what is alive after a collection out of those to come, if it is more than tests leave behind: what was imported.

    Every test ends with a collection (see strict). A framework's half a million objects are here to stay, and so are those of
    its parts that the first use imports: looking through them each time would cost a tenth of a second per test and rank.
    """
    if len(gc.get_objects()) > MANY_OBJECTS:
        gc.freeze()


def _world(backend_name: str) -> World:
    place = launch.environment()
    assert place is not None, "workers are started with torchrun's variables"
    backend = known(backend_name)
    platform = None if backend is PLAIN else get_platform()
    return World(
        rank=place.rank,
        size=place.world_size,
        backend=backend_name,
        device_type=backend.device_type,
        device=backend.device_type if platform is None else platform.device(backend.device_type).current(),
        platform=platform,
        group=_process.state.world,
    )
