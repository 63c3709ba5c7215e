"""Communication beside products that nobody waits for, because a product failed: its memory is nobody's until it is over."""

from __future__ import annotations

import gc
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch

from hp_dtensor.transport import Cut
from hp_platform import get_platform
from hp_platform.group import ProcessGroup
from hp_platform.halves import Halves
from hp_platform.testing import World, distributed
from hp_tp.overlap import OverlapPolicy, gathered, scattered
from hp_tp.overlap.copies import CopiedExchange, CopiedGather
from hp_tp.overlap.matrices import Matrices
from hp_tp.overlap.side_stream import SideQueue, _side_stream, run_beside

ROWS, WIDTH = 512, 1024


# --------------------------------------------------------------------------------------- a device that writes down who waits
class Stream:
    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self.name, self.log, self.num_events = name, log, 0

    def wait_stream(self, other: Stream) -> None:
        self.log.append((self.name, other.name))

    def wait_event(self, event: str) -> None:
        self.log.append((self.name, event))

    def record_event(self) -> str:
        self.num_events += 1
        return f"{self.name} {self.num_events}"


class Device:
    def __init__(self) -> None:
        self.name = f"device {uuid.uuid4()}"  # side streams are kept by this: an id would come again
        self.log: list[tuple[str, str]] = []
        self.now = self.computation = Stream("computation", self.log)
        self.missing = get_platform().device("cpu").missing

    def current(self) -> str:
        return self.name

    def new_stream(self, *, high_priority: bool) -> Stream:
        return Stream("side", self.log)

    def current_stream(self) -> Stream:
        return self.now

    @contextmanager
    def use_stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    kind, made = type(get_platform()), Device()
    supports = kind.supports
    monkeypatch.setattr(kind, "device", lambda *_: made)
    monkeypatch.setattr(kind, "supports", lambda p, name, d=None: name == "streams" or supports(p, name, d))
    return made


def dropped_elsewhere(device: Device, drop: Callable[[], None]) -> list[tuple[str, str]]:
    """Who waits for whom while something is dropped, by a thread that has another current stream."""
    before, device.now = len(device.log), Stream("another", device.log)
    thread = threading.Thread(target=lambda: (drop(), gc.collect()))
    thread.start()
    thread.join()
    device.now = device.computation
    return device.log[before:]


def test_the_computation_waits_for_a_collective_that_nobody_waited_for(device: Device) -> None:
    held = [run_beside("cpu", lambda _: None, torch.ones(1))]
    assert dropped_elsewhere(device, held.clear) == [
        ("computation", "side 2")
    ]  # the first event is before it


def test_it_does_not_wait_twice(device: Device) -> None:
    task = run_beside("cpu", lambda _: None, torch.ones(1))
    task.wait()
    held = [task]
    del task
    assert dropped_elsewhere(device, held.clear) == []


def test_it_waits_for_a_collective_that_fails_when_it_has_begun(device: Device) -> None:
    def start(_: bool) -> None:
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        run_beside("cpu", start, torch.ones(1))
    gc.collect()
    assert device.log == [("side", "computation"), ("computation", "side 2")]


def test_a_device_that_fails_fails_no_finalizer(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("the device has failed")

    def step() -> None:
        """Of a side stream."""

    held: list[Any] = [run_beside("cpu", lambda _: None, torch.ones(1)), SideQueue("cpu")]
    held[1].run(step)
    monkeypatch.setattr(device.computation, "wait_event", fails)
    monkeypatch.setattr(device.computation, "wait_stream", fails)
    assert dropped_elsewhere(device, held.clear) == []  # an error in a finalizer would fail this test


def test_the_computation_waits_for_the_last_step_of_a_queue_that_nobody_waited_for(device: Device) -> None:
    def step() -> None:
        """Of a side stream."""

    for marks, ends in (([], [("computation", "side")]), ([1], [("computation", "side 1")])):
        device.log.clear()
        queue = SideQueue("cpu")
        queue.run(step)
        for _ in marks:
            queue.mark()
        held = [queue]
        del queue
        assert dropped_elsewhere(device, held.clear) == ends
    queue = SideQueue("cpu")
    queue.run(step)
    early = queue.mark()
    queue.run(step)
    last = queue.mark()
    queue.wait(early)
    held = [queue]
    del queue
    assert dropped_elsewhere(device, held.clear) == [("computation", last)]
    queue = SideQueue("cpu")
    queue.run(step)
    queue.wait(queue.mark())
    held = [queue]
    del queue
    assert dropped_elsewhere(device, held.clear) == []


class Alone:
    """Peer memory of one rank."""

    def __init__(self, numel: int, device: str) -> None:
        self.own = torch.zeros(numel, device=device)

    def of(self, rank: int) -> torch.Tensor:
        return self.own

    def copy_each(self, targets: Any, values: Any) -> None:
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)

    def pull(self, *_: Any) -> Any:
        raise AssertionError("nothing is pulled")

    push = pull

    def barrier(self) -> None:
        """Nobody else comes, but it takes its time."""
        take_time(self.own)


def take_time(x: torch.Tensor) -> None:
    """On a GPU about a second of the current stream."""
    if x.is_cuda:
        busy = torch.ones(4096, 4096, device=x.device)
        for _ in range(300):
            busy = busy @ busy * 0.0


def alone(device: str) -> tuple[Matrices, Halves]:
    group = ProcessGroup((0,), 0, "gloo", timedelta(seconds=30), native=object())
    cut = Cut(group, (0,), 0, 0, (ROWS,))
    halves = Halves(get_platform(), group, Alone(2 * ROWS * WIDTH, device), torch.float32, ROWS * WIDTH)
    return Matrices.of((ROWS, WIDTH), cut), halves


def under_way(kind: str, device: str) -> list[Any]:
    """A gather or a reduction that nobody waits for."""
    rows, halves = alone(device)
    x = torch.ones(1, ROWS, WIDTH, device=device)
    if kind == "gather":
        return [CopiedGather(x, rows, halves, [])]
    exchange = CopiedExchange(rows, WIDTH, torch.float32, device, halves)
    exchange.send(x, 0, [0])
    if kind == "sends":
        return [exchange]
    exchange.meet()
    return [exchange.add_up(is_beside=True)]


@pytest.mark.parametrize("kind", ["gather", "sends", "reduction"])
def test_the_computation_waits_for_copies_that_nobody_waited_for(device: Device, kind: str) -> None:
    held = under_way(kind, "cpu")
    found = dropped_elsewhere(device, held.clear)
    assert [name for name, _ in found] == ["computation"]
    end = found[0][1]
    assert end == "side" or end == f"side {_side_stream(device).num_events}"


@pytest.mark.parametrize(
    "multiply",
    [
        lambda x, factor, *rest: gathered.gather_and_multiply(x, [factor, factor], *rest),
        lambda x, factor, *rest: scattered.multiply_and_scatter([x], [factor], *rest),
    ],
    ids=["gather", "scatter"],
)
def test_a_product_that_fails_leaves_no_collective_behind(
    device: Device, monkeypatch: pytest.MonkeyPatch, multiply: Callable[..., Any]
) -> None:
    rows, _ = alone("cpu")
    number = iter(range(10))

    def fails(*_: Any) -> None:
        if next(number) > 0:
            raise RuntimeError("no memory")

    monkeypatch.setattr(get_platform(), "matmul_into", fails)
    for module in (gathered, scattered):
        monkeypatch.setattr(module, "halves_for", lambda *_: None)
    monkeypatch.setattr(gathered.collectives, "all_gather", lambda *_, **__: None)
    monkeypatch.setattr(scattered.collectives, "reduce_scatter", lambda *_, **__: None)
    x, factor = torch.ones(1, ROWS, WIDTH), torch.ones(WIDTH, 3)
    monkeypatch.setattr(OverlapPolicy, "cuts_gather", lambda *_: True)
    monkeypatch.setattr(scattered, "_num_chunks", lambda *_: 2)
    with pytest.raises(RuntimeError, match="no memory"):
        multiply(x, factor, rows, OverlapPolicy(min_nbytes=0))
    gc.collect()
    assert device.log[-1] == ("computation", f"side {_side_stream(device).num_events}")


# ---------------------------------------------------------------------------------------------------------------- on a GPU
def drop_while_late(start: Callable[[], list[Any]], world: World) -> None:
    """Memory of what ``start`` has begun on the side stream, and which is dropped, goes to others, whose values stay."""
    side = _side_stream(get_platform().device(world.device))
    for is_warm in (False, True):  # so that nothing is made or compiled for the first time
        held = start()
        held.clear()
        gc.collect()
        others = [torch.full((ROWS, WIDTH), 7.0, device=world.device) for _ in range(6)]
        if is_warm:
            assert not side.query(), (
                "others should get the memory before that is over, and the host should not wait"
            )
        torch.cuda.synchronize()
        assert all(bool((other == 7.0).all()) for other in others)


@distributed(world_size=1, backends="cuda")
def test_memory_of_a_collective_that_is_dropped_is_nobodys_until_it_is_over(world: World) -> None:
    def start() -> list[Any]:
        x, out = (torch.ones(ROWS, WIDTH, device=world.device) for _ in range(2))

        def launch(_: bool) -> None:
            take_time(x)
            out.copy_(x)

        return [run_beside(world.device, launch, (x, out))]

    drop_while_late(start, world)


@distributed(world_size=1, backends="cuda")
def test_memory_of_a_queue_that_is_dropped_is_nobodys_until_it_is_over(world: World) -> None:
    def start() -> list[Any]:
        x, out = (torch.ones(ROWS, WIDTH, device=world.device) for _ in range(2))

        def step() -> None:
            take_time(x)
            out.copy_(x)

        queue = SideQueue(world.device)
        queue.hold(x, out)
        queue.run(step)
        return [queue]

    drop_while_late(start, world)


@distributed(world_size=1, backends="cuda")
def test_memory_of_copies_that_are_dropped_is_nobodys_until_they_are_over(world: World) -> None:
    for kind in ("gather", "reduction"):
        drop_while_late(lambda kind=kind: under_way(kind, world.device), world)
