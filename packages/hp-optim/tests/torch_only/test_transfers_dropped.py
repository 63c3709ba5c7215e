"""A step that fails while state passes through the device: nobody gets the memory of its copies before they are over."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hp_optim.offload.streaming import Streamed
from hp_optim.offload.transfers import StreamTransfers
from hp_platform import get_platform
from hp_platform.testing import World, distributed

NUMEL, NUM_BUCKETS = 1 << 20, 5


# --------------------------------------------------------------------------------------- a device that writes down who waits
class Stream:
    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self.name, self.log, self.num_events = name, log, 0

    def wait_stream(self, other: Stream) -> None:
        self.log.append((self.name, other.name))

    def wait_event(self, event: Event) -> None:
        self.log.append((self.name, event.name))

    def record_event(self) -> Event:
        self.num_events += 1
        return Event(f"{self.name} {self.num_events}", self.log)


class Event:
    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self.name, self.log = name, log

    def synchronize(self) -> None:
        self.log.append(("host", self.name))


class Device:
    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.now = Stream("computation", self.log)
        self.names = iter(("coming", "leaving"))
        self.missing = get_platform().device("cpu").missing

    def new_stream(self) -> Stream:
        return Stream(next(self.names), self.log)

    def current_stream(self) -> Stream:
        return self.now

    @contextmanager
    def use_stream(self, stream: Stream) -> Iterator[None]:
        yield


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(type(get_platform()), "device", lambda *_: made)
    return made


def streamed(transfers: StreamTransfers, device: str, pin: bool) -> tuple[Streamed, list[torch.Tensor]]:
    """Five buckets of a tensor, and what they are on the host."""
    platform = get_platform()
    x = torch.zeros(NUM_BUCKETS * NUMEL, device=device)
    state = torch.full((NUM_BUCKETS * NUMEL,), 3.0, pin_memory=pin)
    return Streamed(platform, transfers, device, 4 * NUMEL, ([x],), ([state],)), [state]


def failing(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Its call of this number, from 0 on, fails."""
    numbers = iter(range(1000))

    def called(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == number:
            raise RuntimeError("in the middle")
        return function(*args, **kwargs)

    return called


def update(beside: Any, state: Any) -> None:
    """Nothing changes."""


# With three slots: two come, then of each bucket another one comes, it is updated, and goes.
@pytest.mark.parametrize("number", [0, 1, 2, 3, 4])
def test_the_computation_waits_for_all_copies_of_a_step_in_which_one_fails(
    device: Device, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    platform = get_platform()
    transfers = StreamTransfers(platform, "cpu")
    step, _ = streamed(transfers, "cpu", pin=False)
    monkeypatch.setattr(platform, "foreach_copy_", failing(platform.foreach_copy_, number))
    with pytest.raises(RuntimeError, match="in the middle"):
        step.run(update)
    assert device.log[-2:] == [("computation", "coming"), ("computation", "leaving")]


@pytest.mark.parametrize("number", [0, 2, 4])
def test_the_computation_waits_for_all_copies_of_a_step_whose_update_fails(
    device: Device, number: int
) -> None:
    step, _ = streamed(StreamTransfers(get_platform(), "cpu"), "cpu", pin=False)
    with pytest.raises(RuntimeError, match="in the middle"):
        step.run(failing(update, number))
    assert device.log[-2:] == [("computation", "coming"), ("computation", "leaving")]


def test_the_host_waits_for_a_store_that_fails_when_it_has_begun(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = get_platform()
    transfers = StreamTransfers(platform, "cpu")
    here, there = torch.ones(1), torch.ones(1)
    transfers.store([(there, here)], [])
    monkeypatch.setattr(platform, "foreach_copy_", failing(platform.foreach_copy_, 0))
    with pytest.raises(RuntimeError, match="in the middle"):
        transfers.store([(there, here)], [])
    transfers.land()
    assert device.log == [("host", "leaving 2")]


# ---------------------------------------------------------------------------------------------------------------- on a GPU
@distributed(world_size=1, backends="cuda")
def test_memory_of_a_step_that_fails_is_nobodys_until_its_copies_are_over(world: World) -> None:
    platform = world.platform
    transfers = StreamTransfers(platform, world.device)
    step, (state,) = streamed(transfers, world.device, pin=True)
    step.run(update)
    busy = torch.ones(4096, 4096, device=world.device)
    torch.cuda.synchronize()
    for side, calls in ((transfers._coming, 1), (transfers._coming, 2), (transfers._leaving, 4)):
        with torch.cuda.stream(side):
            for _ in range(300):
                busy = busy @ busy * 0.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(platform, "foreach_copy_", failing(platform.foreach_copy_, calls))
            with pytest.raises(RuntimeError, match="in the middle"):
                step.run(update)
        gc.collect()
        others = [torch.full((NUMEL,), 7.0, device=world.device) for _ in range(8)]
        assert not side.query(), "the host should wait for nothing"
        torch.cuda.synchronize()
        assert all(bool((other == 7.0).all()) for other in others)
        assert bool((state == 3.0).all()), "what left should be what was there"
        del others
