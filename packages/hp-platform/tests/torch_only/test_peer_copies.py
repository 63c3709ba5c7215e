"""Copies between peers as one call of the driver, with a driver that copies on the host; and without one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from hp_platform.torch._peer_copies import MAX_KNOWN, Pull, Push
from hp_platform.torch.device import _copy_batches
from hp_platform.torch.device._copy_batches import COPY_BATCH, CopyBatches, find_copy_batch

STREAM = 77
INVALID_VALUE = 1
SIZES = (5, 1, 64, 0, 129, 33)
DTYPES = (torch.bfloat16, torch.float32)


class Driver:
    """What the driver is given, and does: copies in some other order."""

    def __init__(self, result: int = 0) -> None:
        self.result = result
        self.counts: list[int] = []
        self.streams: list[int] = []
        self.call = COPY_BATCH(self._copy)

    def _copy(
        self,
        targets: Any,
        sources: Any,
        nbytes: Any,
        count: int,
        attributes: Any,
        first: Any,
        num: int,
        *rest: Any,
    ) -> int:
        self.counts.append(count)
        self.streams.append(rest[1])
        if self.result:
            return self.result
        facts = attributes[0]
        assert (num, first[0], facts.source_access_order, facts.flags) == (1, 0, 1, 1)
        assert [*facts.source_hint, *facts.target_hint] == [0] * 4
        columns = [(ctypes.c_uint64 * count).from_address(each) for each in (targets, sources, nbytes)]
        rows = list(zip(*columns, strict=True))
        if not all(map(all, rows)):
            return INVALID_VALUE
        Random(0).shuffle(rows)
        for row in rows:
            ctypes.memmove(*row)
        return 0


def batches_of(driver: Driver, stream_of: Callable[[int], int] = lambda device: STREAM) -> CopyBatches:
    return CopyBatches(driver.call, stream_of)


@pytest.fixture(params=["one call", "no driver", "default stream"])
def batches(request: pytest.FixtureRequest) -> CopyBatches | None:
    if request.param == "no driver":
        return None
    driver = Driver()
    return batches_of(driver, lambda device: STREAM * (request.param == "one call"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_pulled_comes_where_it_belongs_wherever_that_lies_now(
    batches: CopyBatches | None, dtype: torch.dtype
) -> None:
    """Targets in two memories, of which one is given back and got again."""
    base, alone = torch.empty(sum(SIZES) + 3, dtype=dtype), torch.empty(7, dtype=dtype)
    targets = [*base[3:].split(SIZES), alone]
    sources = [torch.empty_like(target) for target in targets]
    base.untyped_storage().resize_(0)
    pull = Pull(batches, targets, sources)
    for number in range(4):
        base.untyped_storage().resize_(base.numel() * base.itemsize)
        others = torch.empty(1000 * (number + 1))  # so that memory moves
        for at, source in enumerate(sources):
            source.copy_(torch.arange(source.numel()) + 10 * number + at)
        pull()
        for target, source in zip(targets, sources, strict=True):
            assert torch.equal(target, source)
        base.untyped_storage().resize_(0)
        del others


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_pushed_comes_from_the_tensors_that_are_given(
    batches: CopyBatches | None, dtype: torch.dtype
) -> None:
    memory = torch.full((300,), -1.0, dtype=dtype)
    parts = [(0, 0), (1, 3), (1, 5), (0, 7), (1, 0)]
    sizes = [5, 2, 0, 93, 1]
    places = list(memory[1:102].split(sizes))
    push = Push(batches, places, parts)
    for number in range(2 * MAX_KNOWN):  # more addresses than are kept
        tensors = [torch.arange(100, dtype=dtype) + number, torch.arange(5, dtype=dtype) - number]
        push(tensors)
        for place, size, (tensor, start) in zip(places, sizes, parts, strict=True):
            assert torch.equal(place, tensors[tensor][start : start + size])
    assert memory[0] == -1.0
    assert torch.all(memory[102:] == -1.0)


def test_all_copies_are_one_call_on_the_current_stream() -> None:
    driver = Driver()
    batches = batches_of(driver)
    xs = [torch.ones(3) for _ in range(200)]
    ys = [torch.zeros(3) for _ in range(200)]
    Pull(batches, ys, xs)()
    Push(batches, ys, [(at, 0) for at in range(200)])(xs)
    assert driver.counts == [200, 200]
    assert driver.streams == [STREAM] * 2
    assert all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


def test_nothing_to_copy_is_no_call() -> None:
    driver = Driver()
    Pull(batches_of(driver), [], [])()
    Push(batches_of(driver), [], [])([torch.ones(1)])
    assert not driver.counts


def test_nothing_that_is_copied_is_recorded() -> None:
    x = torch.ones(3, requires_grad=True)
    y, place = torch.zeros(3), torch.zeros(2)
    Pull(None, [y], [x])()
    Push(None, [place], [(0, 1)])([x])
    assert not y.requires_grad
    assert not place.requires_grad
    assert y.tolist() == [1.0] * 3


def test_a_driver_that_refuses_is_asked_once_and_copies_are_made_one_by_one() -> None:
    driver = Driver(result=801)
    batches = batches_of(driver)
    x, y = torch.ones(3), torch.zeros(3)
    pull = Pull(batches, [y], [x])
    with pytest.warns(UserWarning, match=r"refused a batch of 1 copies \(CUresult 801\)"):
        pull()
    assert y.tolist() == [1.0] * 3
    x.fill_(2.0)
    pull()
    assert y.tolist() == [2.0] * 3
    assert driver.counts == [1]


class Library:
    """libcuda as far as functions are found in it."""

    def __init__(self, address: int, result: int = 0, status: int = 0) -> None:
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p
        )

        def find(name: bytes, found: int, version: int, flags: int, told: int) -> int:
            assert (name, version, flags) == (b"cuMemcpyBatchAsync", 12080, 0)
            ctypes.c_void_p.from_address(found).value = address
            ctypes.c_int.from_address(told).value = status
            return result

        self.cuGetProcAddress_v2 = kind(find)


def test_the_function_is_found_in_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    address = ctypes.cast(driver.call, ctypes.c_void_p).value
    assert address is not None
    monkeypatch.setattr(_copy_batches.ctypes, "CDLL", lambda name: Library(address))
    found = find_copy_batch()
    x, y = torch.ones(3), torch.zeros(3)
    Pull(CopyBatches(found, lambda device: STREAM), [y], [x])()
    assert (y.tolist(), driver.counts) == ([1.0] * 3, [1])


@pytest.mark.parametrize(
    "library",
    [OSError("no driver"), object(), Library(0), Library(1, result=500), Library(1, status=1)],
    ids=["no driver", "an old one", "no address", "fails", "too old for the version"],
)
def test_a_driver_without_the_function_has_none(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    def load(name: str) -> Any:
        if isinstance(library, OSError):
            raise library
        return library

    monkeypatch.setattr(_copy_batches.ctypes, "CDLL", load)
    assert find_copy_batch() is None
