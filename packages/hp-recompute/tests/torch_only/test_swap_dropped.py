"""What is dropped while it is copied from or to the host: nobody gets its memory before the copy is over."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hp_platform import get_platform
from hp_platform.testing import World, distributed
from hp_recompute.swapping.copies import StreamCopies
from hp_recompute.swapping.manager import SwapManager
from hp_recompute.swapping.storage import SavedTensor

NUMEL = 1 << 20


# ------------------------------------------------------------------------------------ a device that writes down what it is told
class Stream:
    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: Stream) -> None:
        """Nothing is late."""

    wait_event = wait_stream

    def record_event(self) -> Event:
        return Event()


class Event:
    def query(self) -> bool:
        return False  # of a copy that takes its time


class Device:
    def __init__(self) -> None:
        self.now = Stream("computation")
        self.missing = get_platform().device("cpu").missing
        self.kept: list[tuple[int, str]] = []
        """Addresses of memory that is kept from others, and by which stream."""

    def new_stream(self) -> Stream:
        return Stream("copies")

    def current_stream(self) -> Stream:
        return self.now

    @contextmanager
    def use_stream(self, stream: Stream) -> Iterator[None]:
        yield

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def record_stream(self, x: torch.Tensor, stream: Stream) -> None:
        self.kept.append((x.data_ptr(), stream.name))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made, kind = Device(), type(get_platform())
    monkeypatch.setattr(kind, "device", lambda *_: made)
    return made


def elsewhere(run: Callable[[], None]) -> None:
    """In another thread, with all garbage."""
    thread = threading.Thread(target=lambda: (run(), gc.collect()))
    thread.start()
    thread.join()


class Swapped:
    """Two tensors of a group that moves by hand; nobody else holds them."""

    def __init__(self, device: str = "cpu") -> None:
        self.manager = SwapManager(copies=StreamCopies)
        self.manager.ensure_group("group")
        self.saved: list[SavedTensor] = []
        for value in (1.0, 2.0):
            self.saved.append(self.manager.add_storage("group", torch.full((NUMEL,), value, device=device)))

    @property
    def places(self) -> list[int]:
        """On the device now."""
        return [saved.x.data_ptr() for saved in self.saved if saved.x is not None]

    @property
    def coming(self) -> list[int]:
        return [saved.storage.memory.data_ptr() for saved in self.saved]

    def drop(self) -> None:
        """All of it, but the manager."""
        self.saved.clear()
        if "group" in self.manager._kept:
            self.manager.drop_group("group")

    def leave(self) -> None:
        self.manager.launch_offload("group")
        self.manager.wait_offload("group")


def kept_by_copies(places: list[int]) -> list[tuple[int, str]]:
    return sorted((place, "copies") for place in places)


def test_what_is_dropped_on_its_way_to_the_host_is_kept_from_others(device: Device) -> None:
    swapped = Swapped()
    swapped.manager.launch_offload("group")
    places = swapped.places
    assert device.kept == []
    elsewhere(swapped.drop)
    assert sorted(device.kept) == kept_by_copies(places)


def test_what_has_been_waited_for_is_not(device: Device) -> None:
    swapped = Swapped()
    swapped.leave()
    swapped.manager.launch_load("group")
    swapped.manager.wait_load("group")
    elsewhere(swapped.drop)
    del swapped
    gc.collect()
    assert device.kept == []


def test_what_stays_because_backward_came_first_is_kept_from_others_when_it_goes(device: Device) -> None:
    swapped = Swapped()
    swapped.manager.launch_offload("group")
    group, _ = swapped.manager._kept["group"]
    group.stay()
    assert sorted(device.kept) == kept_by_copies(swapped.places)
    assert [float(saved.get()[0]) for saved in swapped.saved] == [1.0, 2.0]


def test_what_comes_for_a_manager_that_is_dropped_is_kept_from_others(device: Device) -> None:
    swapped = [Swapped()]
    swapped[0].leave()
    swapped[0].manager.launch_load("group")
    places = swapped[0].coming
    swapped[0].drop()
    gc.collect()
    assert device.kept == []  # the copies hold it
    elsewhere(swapped.clear)
    assert sorted(device.kept) == kept_by_copies(places)


@pytest.mark.parametrize("fails_at", ["memory", "copy"])
def test_a_way_back_that_fails_is_gone_again(
    device: Device, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    swapped = Swapped()
    swapped.leave()
    number = iter(range(2))

    def fails_once(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if next(number, None) == 1:  # the second one
                raise RuntimeError("no memory")
            return function(*args, **kwargs)

        return called

    copies: Any = swapped.manager.copies_of("cpu")
    if fails_at == "memory":
        monkeypatch.setattr(copies, "empty_on_device", fails_once(copies.empty_on_device))
    else:
        monkeypatch.setattr(get_platform(), "copy_", fails_once(get_platform().copy_))
    with pytest.raises(RuntimeError, match="no memory"):
        swapped.saved[0].get()
    assert [stream for _, stream in device.kept] == ([] if fails_at == "memory" else ["copies"] * 2)
    assert all(
        bool((saved.get() == value).all()) for saved, value in zip(swapped.saved, (1.0, 2.0), strict=True)
    )


def test_threads_that_ask_and_wait_at_the_same_time_lose_nothing(device: Device) -> None:
    copies = StreamCopies(get_platform(), "cpu")
    asked: list[Any] = []

    def ask() -> None:
        for _ in range(200):
            target = copies.empty_on_device(8)
            asked.append((copies.to_device([(target, copies.empty_on_host(8))]), target))
            copies.wait(asked[0][0])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = {target.data_ptr() for _, targets in copies._held.values() for target in targets}
    assert held == {target.data_ptr() for event, target in asked if event is not asked[0][0]}


# ---------------------------------------------------------------------------------------------------------------- on a GPU
def hold_back(stream: Any, device: str) -> None:
    """About a second."""
    busy = torch.ones(4096, 4096, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(300):
            busy = busy @ busy * 0.0


def warm_up(device: str) -> None:
    """Page-locked memory is there when it is wanted: to take it may wait for the device."""
    swapped = Swapped(device)
    swapped.leave()
    swapped.manager.launch_load("group")
    swapped.manager.wait_load("group")
    swapped.drop()
    del swapped
    gc.collect()
    torch.cuda.synchronize()


def others(stream: Any, device: str) -> list[torch.Tensor]:
    """They would get the memory."""
    made = [torch.full((NUMEL,), 7.0, device=device) for _ in range(6)]
    assert not stream.query(), "the host should wait for nothing"
    return made


@distributed(world_size=1, backends="cuda")
def test_memory_of_what_comes_for_nobody_is_nobodys_until_it_has_come(world: World) -> None:
    warm_up(world.device)
    swapped = [Swapped(world.device)]
    swapped[0].leave()
    torch.cuda.synchronize()
    copies: Any = swapped[0].manager.copies_of(world.device)
    stream = copies.stream
    hold_back(stream, world.device)
    swapped[0].manager.launch_load("group")
    swapped[0].drop()
    del copies
    swapped.clear()
    gc.collect()
    made = others(stream, world.device)
    torch.cuda.synchronize()
    assert all(bool((x == 7.0).all()) for x in made)


@distributed(world_size=1, backends="cuda")
def test_what_leaves_for_nobody_is_read_before_others_write_there(world: World) -> None:
    warm_up(world.device)
    swapped = Swapped(world.device)
    copies: Any = swapped.manager.copies_of(world.device)
    hold_back(copies.stream, world.device)
    swapped.manager.launch_offload("group")
    parcels = [saved.storage.parcel for saved in swapped.saved]
    on_host = [parcel._on_host for parcel in parcels]
    del parcels
    swapped.drop()
    gc.collect()
    others(copies.stream, world.device)
    torch.cuda.synchronize()
    for values, expected in zip(on_host, (1.0, 2.0), strict=True):
        assert bool((values.view(torch.float32) == expected).all())
