"""Peers that wait for one that does not come: it is named before the device gives up, and in the error that comes of that.

Threads for ranks, a dict for the key-value store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
import torch

from hp_fsdp.peer_gather import PeerGather
from hp_platform import CollectiveTimeoutError, diagnosis, get_platform
from hp_platform.diagnosis import Publisher
from hp_platform.group import ProcessGroup
from hp_platform.halves import Halves
from hp_platform.platform import Platform
from hp_platform.repeated import WorkAsItIs

SECONDS = 2.0
NUM_RANKS = 3


class _Store:
    """A key-value store, and as much of a platform as it takes to ask it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def store_set(self, store: object, key: str, value: bytes) -> None:
        self.values[key] = value

    def store_get(self, store: object, key: str) -> bytes | None:
        return self.values.get(key)


class _PeerMemory:
    """A barrier that nobody comes to in time ends as a device's does."""

    def __init__(self, parts: list[torch.Tensor], meeting: threading.Barrier) -> None:
        self._parts, self._meeting = parts, meeting

    def of(self, rank: int) -> torch.Tensor:
        return self._parts[rank]

    def copy_each(self, targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)

    def pull(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Callable[[], None]:
        return lambda: self.copy_each(targets, sources)

    def push(self, *_: object) -> None:
        raise AssertionError("gathers pull")

    def barrier(self) -> None:
        try:
            self._meeting.wait()
        except threading.BrokenBarrierError:
            raise RuntimeError("CUDA error: unspecified launch failure") from None


class _Rank:
    def __init__(
        self, rank: int, store: _Store, parts: list[torch.Tensor], meeting: threading.Barrier
    ) -> None:
        ranks = tuple(range(NUM_RANKS))
        self.group = ProcessGroup(ranks, rank, "nccl", timedelta(seconds=SECONDS), native=object())
        platform: Platform = store  # type: ignore[assignment]
        self.publisher = Publisher(platform, None, rank)
        self.publisher.watch(self.group)
        memory = _PeerMemory(parts, meeting)
        halves = Halves(get_platform(), self.group, memory, torch.float32, 64)  # type: ignore[arg-type]
        self.target = torch.zeros(NUM_RANKS * 4)
        self.gather = PeerGather(get_platform(), halves, [self.target], [4], [self.target], WorkAsItIs())

    def run(self, unit: str) -> None:
        """A gather of the unit's."""
        self.group.purpose = f"gather of {unit}"
        self.gather.run([torch.full((4,), self.group.rank + 1.0)])
        self.group.purpose = ""


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "PERIOD_SECONDS", 0.1)


def test_the_rank_that_does_not_come_and_its_last_unit_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    store, meeting = _Store(), threading.Barrier(NUM_RANKS, timeout=SECONDS)
    parts = [torch.zeros(128) for _ in range(NUM_RANKS)]
    ranks = [_Rank(rank, store, parts, meeting) for rank in range(NUM_RANKS)]
    errors: dict[int, BaseException] = {}

    def course(rank: _Rank) -> None:
        try:
            rank.run("Block 'layers.0'")
            if rank.group.rank == 1:
                return  # it is elsewhere
            rank.run("Block 'layers.1'")
        except BaseException as error:
            errors[rank.group.rank] = error

    threads = [threading.Thread(target=course, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in ranks:
        rank.publisher.stop()
    assert ranks[1].target.tolist() == [1.0] * 4 + [2.0] * 4 + [3.0] * 4
    missing = "rank 1 has not come: the last it reported on this group is all_gather (gather of Block 'layers.0') number 1"
    assert sorted(errors) == [0, 2]
    for number, error in errors.items():
        assert isinstance(error, CollectiveTimeoutError)
        failed, waited, named = str(error).splitlines()
        assert failed.startswith("all_gather number 2 on the group of 3 (ranks 0, 1, 2), ")
        assert failed.endswith(
            f"failed on rank {number}, whose backend is nccl: CUDA error: unspecified launch failure"
        )
        assert waited.startswith(f"Before that, rank {number} has been waiting for ")
        assert waited.endswith(
            "s in all_gather (gather of Block 'layers.1') number 2 on the group of 3 (ranks 0, 1, 2) (time-out 2 s):"
        )
        assert named == missing
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("rank 1 ")] == [missing, missing]


def test_a_device_that_fails_without_a_wait_before_is_no_time_out(capsys: pytest.CaptureFixture[str]) -> None:
    store, meeting = _Store(), threading.Barrier(NUM_RANKS, timeout=0.01)
    rank = _Rank(0, store, [torch.zeros(128) for _ in range(NUM_RANKS)], meeting)
    with pytest.raises(RuntimeError, match="unspecified launch failure$") as caught:
        rank.run("Block")
    rank.publisher.stop()
    assert not isinstance(caught.value, CollectiveTimeoutError)
    assert capsys.readouterr().err == ""


def test_a_wait_that_ended_well_is_no_cause_of_what_fails_much_later(
    capsys: pytest.CaptureFixture[str],
) -> None:
    store, meeting = _Store(), threading.Barrier(1)
    rank = _Rank(0, store, [torch.zeros(128) for _ in range(NUM_RANKS)], meeting)
    rank.run("Block 'a'")
    deadline = time.monotonic() + 20
    while not rank.group.last_wait[1] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert diagnosis.said_before(rank.group).startswith(
        "rank 0 has been waiting for 2 s in all_gather (gather of Block 'a')"
    )
    rank.run("Block 'b'")
    assert diagnosis.said_before(rank.group)
    rank.run("Block 'c'")
    assert not diagnosis.said_before(rank.group)
    rank.publisher.stop()
    assert capsys.readouterr().err.startswith("rank 0 has been waiting")
