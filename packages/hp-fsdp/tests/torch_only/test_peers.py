"""Copies between peers, with threads for ranks and plain tensors for peer memory: what they must do in any timing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from random import Random

import pytest
import torch

import hp_platform.halves
from hp_fsdp.batches import cut_into_batches
from hp_fsdp.halves import HALF_NBYTES, half_numel
from hp_fsdp.peer_exchange import PeerExchange
from hp_fsdp.peer_gather import PeerGather
from hp_platform import get_platform
from hp_platform.group import ProcessGroup
from hp_platform.halves import Halves
from hp_platform.repeated import RepeatedWork, WorkAsItIs
from hp_platform.testing import count_collectives

SIZES = (5, 0, 1, 130, 64, 3)
CAPACITIES = (64, 128, 320)


@pytest.fixture(params=[0, 128, None], ids=["all large", "some large", "none large"])
def _bound(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which parts that stay have a launch of their own: all, those from 64 elements on, none."""
    if request.param is not None:
        monkeypatch.setattr(hp_platform.halves, "LARGE_NBYTES", request.param)


class _Shared:
    """Memory of all ranks. A barrier lets each go on at a time of its own."""

    def __init__(self, num_ranks: int) -> None:
        self.parts: list[torch.Tensor] = []
        self.meeting = threading.Barrier(num_ranks, timeout=30)
        self.lock = threading.Lock()


class _PeerMemory:
    def __init__(self, shared: _Shared, rank: int) -> None:
        self.shared, self.random = shared, Random(rank)

    def of(self, rank: int) -> torch.Tensor:
        return self.shared.parts[rank]

    def copy_each(self, targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        for target, value in zip(targets, values, strict=True):
            assert target.is_contiguous()
            assert value.is_contiguous()
            assert target.dtype == value.dtype
            target.copy_(value)
            self.pause()

    def pull(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Callable[[], None]:
        return lambda: self.copy_each(targets, sources)

    def push(
        self, places: Sequence[torch.Tensor], parts: Sequence[tuple[int, int]]
    ) -> Callable[[Sequence[torch.Tensor]], None]:
        pairs = list(zip(parts, places, strict=True))

        def copy(blocks: Sequence[torch.Tensor]) -> None:
            values = [blocks[block].narrow(0, start, place.shape[0]) for (block, start), place in pairs]
            self.copy_each(places, values)

        return copy

    def barrier(self) -> None:
        self.pause()
        self.shared.meeting.wait()

    def pause(self) -> None:
        if self.random.random() < 0.3:
            time.sleep(self.random.random() * 2e-3)


def on_threads(num_ranks: int, numel: int, dtype: torch.dtype, run: Callable[[int, Halves], None]) -> None:
    """``run(rank, halves)`` of every rank at the same time, with halves of ``numel`` elements."""
    shared = _Shared(num_ranks)
    shared.parts = [torch.full((2 * numel,), float("nan"), dtype=dtype) for _ in range(num_ranks)]
    errors: list[BaseException] = []

    def rank_runs(rank: int) -> None:
        try:
            group = ProcessGroup(
                tuple(range(num_ranks)), rank, "gloo", timedelta(seconds=30), native=object()
            )
            run(rank, Halves(get_platform(), group, _PeerMemory(shared, rank), dtype, numel))
        except BaseException as error:
            errors.append(error)
            shared.meeting.abort()

    threads = [threading.Thread(target=rank_runs, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("capacity", [1, 7, 64, 1000])
def test_batches_hold_every_element_once_in_order(capacity: int) -> None:
    batches = cut_into_batches(SIZES, capacity)
    seen, start = [], 0
    for batch in batches:
        assert batch.start == start
        assert sum(part.numel for part in batch.parts) == batch.numel <= capacity
        offset = 0
        for part in batch.parts:
            assert part.offset == offset
            seen.extend((part.piece, part.start + i) for i in range(part.numel))
            offset += part.numel
        start += batch.numel
    assert seen == [(piece, i) for piece, size in enumerate(SIZES) for i in range(size)]
    assert len(batches) == -(-sum(SIZES) // capacity)


def test_halves_are_small_and_have_a_row_for_every_rank_of_an_exchange() -> None:
    assert half_numel("gather", 100, 4, 2) == 128
    assert half_numel("exchange", 100, 4, 2) == 4 * 128
    for use, ranks in (("gather", 8), ("exchange", 7)):
        numel = half_numel(use, 10**9, ranks, 2)
        assert HALF_NBYTES - 64 * 2 * 8 < numel * 2 <= HALF_NBYTES


@pytest.mark.usefixtures("_bound")
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_a_gather_fills_all_parameters_with_the_pieces_of_all_ranks(num_ranks: int, capacity: int) -> None:
    rounds = 8

    def piece(rank: int, number: int, size: int) -> torch.Tensor:
        return torch.arange(size, dtype=torch.float32) + 1000 * rank + number

    def run(rank: int, halves: Halves) -> None:
        targets = [torch.full((num_ranks * size,), -1.0, dtype=torch.bfloat16) for size in SIZES]
        gather = PeerGather(get_platform(), halves, targets, SIZES, targets, WorkAsItIs())
        for number in range(rounds):
            gather.run([piece(rank, number, size) for size in SIZES])
            for size, target in zip(SIZES, targets, strict=True):
                expected = torch.cat([piece(other, number, size) for other in range(num_ranks)])
                assert torch.equal(target, expected.bfloat16())

    on_threads(num_ranks, capacity, torch.bfloat16, run)


@pytest.mark.usefixtures("_bound")
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_an_exchange_adds_up_the_parts_of_all_ranks_in_the_dtype_of_the_result(
    num_ranks: int, capacity: int, op: str
) -> None:
    rounds = 8

    def block(rank: int, number: int, size: int) -> torch.Tensor:
        # Numbers that float16 holds, whose sums it does not.
        values = torch.arange(num_ranks * size) % 7 + 1
        return (values * (2.0**-11 if (rank + number) % 2 else 1.0)).half()

    def run(rank: int, halves: Halves) -> None:
        row = torch.empty(sum(SIZES) + 2)
        exchange = PeerExchange(get_platform(), halves, SIZES, "all_to_all", WorkAsItIs())
        for number in range(rounds):
            row.fill_(-5.0)
            blocks = [block(rank, number, size) for size in SIZES]
            exchange.run(blocks, row, op)
            parts = [
                sum(
                    block(other, number, size).view(num_ranks, size)[rank].double()
                    for other in range(num_ranks)
                )
                for size in SIZES
            ]
            expected = torch.cat(parts) / (num_ranks if op == "mean" else 1)
            torch.testing.assert_close(row[:-2].double(), expected, rtol=1e-7, atol=0.0)
            assert row[-2:].tolist() == [-5.0, -5.0], "what lies behind is somebody else's"

    on_threads(num_ranks, num_ranks * capacity, torch.float16, run)


class _Kept:
    """A record that does the same on the same tensors."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.launch = work


class _Recorder:
    """Of a device that keeps work."""

    def place(self, tensors: Sequence[torch.Tensor]) -> int:
        return 0

    def layout(self, x: torch.Tensor) -> tuple[object, ...]:
        return x.data_ptr(), x.dtype, x.shape, x.stride()

    def first(self, work: Callable[[], None]) -> None:
        work()

    def record(self, work: Callable[[], None]) -> _Kept:
        return _Kept(work)

    def count_writes(self, xs: Sequence[torch.Tensor]) -> None:
        pass


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_a_gather_that_comes_again_is_kept_with_its_pieces_and_its_half(
    num_ranks: int, capacity: int
) -> None:
    """With an odd number of batches every second gather begins in the other half."""

    def run(rank: int, halves: Halves) -> None:
        repeated = RepeatedWork(_Recorder())  # type: ignore[arg-type]
        targets = [torch.empty(num_ranks * size, dtype=torch.bfloat16) for size in SIZES]
        gather = PeerGather(get_platform(), halves, targets, SIZES, targets, repeated)
        for _ in range(2):
            pieces = [torch.empty(size) for size in SIZES]
            for number in range(8):
                for target in targets:
                    target.fill_(-1.0)
                for piece in pieces:
                    piece.copy_(torch.arange(piece.numel()) + 1000 * rank + number)
                gather.run(pieces)
                for size, target in zip(SIZES, targets, strict=True):
                    expected = [torch.arange(size) + 1000 * other + number for other in range(num_ranks)]
                    assert torch.equal(target, torch.cat(expected).bfloat16())
        num_halves = 1 + len(cut_into_batches(SIZES, capacity)) % 2
        assert repeated.num_launched == 2 * (8 - 1 - num_halves)

    on_threads(num_ranks, capacity, torch.bfloat16, run)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_an_exchange_that_comes_again_is_kept_with_its_blocks_its_half_and_its_operation(
    num_ranks: int, capacity: int
) -> None:
    def run(rank: int, halves: Halves) -> None:
        repeated = RepeatedWork(_Recorder())  # type: ignore[arg-type]
        exchange = PeerExchange(get_platform(), halves, SIZES, "all_to_all", repeated)
        row = torch.empty(sum(SIZES))
        sets = [[torch.empty(num_ranks * size, dtype=torch.float16) for size in SIZES] for _ in range(2)]
        for number in range(24):
            blocks, op = sets[number % 2], ("sum", "mean")[number // 2 % 2]
            for block in blocks:
                block.copy_(torch.arange(block.numel()) % 7 + rank + number)
            exchange.run(blocks, row.fill_(-5.0), op)
            parts = []
            for size in SIZES:
                start = torch.arange(num_ranks * size).view(num_ranks, size)[rank] % 7
                parts.append(sum(start + other + number for other in range(num_ranks)))
            expected = torch.cat(parts) / (num_ranks if op == "mean" else 1)
            torch.testing.assert_close(row, expected.float(), rtol=1e-6, atol=0.0)
        assert repeated.num_launched >= 24 - 2 * 2 * 2 * 2

    on_threads(num_ranks, num_ranks * capacity, torch.float16, run)


def test_copies_count_as_the_collectives_that_they_stand_for() -> None:
    def run(rank: int, halves: Halves) -> None:
        targets = [torch.empty(2 * size, dtype=torch.float16) for size in SIZES]
        blocks = [torch.ones(2 * size, dtype=torch.float16) for size in SIZES]
        gather = PeerGather(get_platform(), halves, targets, SIZES, targets, WorkAsItIs())
        gather.run([torch.ones(size) for size in SIZES])
        exchange = PeerExchange(get_platform(), halves, SIZES, "all_to_all", WorkAsItIs())
        exchange.run(blocks, torch.empty(sum(SIZES)), "sum")

    with count_collectives() as counted:
        on_threads(2, 128, torch.float16, run)
    counted.assert_counts(all_gather=2, all_to_all=2)  # both ranks are in this process
    nbytes = 2 * sum(SIZES) * 2
    assert counted.nbytes("all_gather") == counted.nbytes("all_to_all") == 2 * nbytes
