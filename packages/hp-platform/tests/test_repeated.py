"""Work that comes again: when it is done as it is, recorded, and launched."""

from __future__ import annotations

from typing import Any

import pytest

from hp_platform.repeated import RepeatedWork, WorkAsItIs


class Mark:
    def __init__(self) -> None:
        self.is_reached = False

    def query(self) -> bool:
        return self.is_reached


class Record:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name, self.marked = device, name, Mark()

    def launch(self) -> None:
        self.device.log.append(f"launch {self.name}")

    def mark(self) -> Mark:
        return self.marked

    def __del__(self) -> None:
        self.device.log.append(f"drop {self.name}")


class Device:
    """Tensors are their layouts. What a work starts is logged, and in a recording kept out of the log."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.stream: Any = 0
        self.records: list[Record] = []
        self.refuses = False
        self.num_first = 0

    def place(self, tensors: Any) -> Any:
        return self.stream

    def layout(self, x: Any) -> Any:
        return x

    def first(self, work: Any) -> None:
        self.num_first = self.num_first + 1
        work()

    def record(self, work: Any) -> Record:
        before, self.log = self.log, []
        try:
            work()
            started = self.log
        finally:
            self.log = before
        if self.refuses:
            raise RuntimeError("it waits")
        self.log.append("record")
        return Record(self, "+".join(started))

    def count_writes(self, xs: Any) -> None:
        self.log.append(f"count {len(xs)}")


@pytest.fixture
def device() -> Device:
    return Device()


def run(
    repeated: RepeatedWork, device: Device, name: str = "a", *tensors: Any, written: Any = ()
) -> list[str]:
    """What has happened."""
    start = len(device.log)
    repeated.run(name, tensors, lambda: device.log.append(f"do {name}"), written)
    return device.log[start:]


def test_work_is_done_then_recorded_then_launched(device: Device) -> None:
    repeated = RepeatedWork(device)
    assert run(repeated, device) == ["do a"]
    assert run(repeated, device) == ["record", "launch do a"]
    assert run(repeated, device) == ["launch do a"]
    assert repeated.num_launched == 2
    assert device.num_first == 1
    assert not repeated.failures


def test_other_tensors_names_and_streams_are_other_work(device: Device) -> None:
    repeated = RepeatedWork(device)
    for _ in range(2):
        run(repeated, device, "a", 1, 2)
    assert run(repeated, device, "a", 1, 2) == ["launch do a"]
    assert run(repeated, device, "a", 1, 3) == ["do a"]
    assert run(repeated, device, "b", 1, 2) == ["do b"]
    device.stream = 1
    assert run(repeated, device, "a", 1, 2) == ["do a"]
    device.stream = 0
    assert run(repeated, device, "a", 1, 2) == ["launch do a"]


def test_writes_of_a_launch_are_counted_and_work_counts_its_own(device: Device) -> None:
    repeated = RepeatedWork(device)
    assert run(repeated, device, written=[1, 2]) == ["do a"]
    assert run(repeated, device, written=[1, 2]) == ["record", "launch do a"]
    assert run(repeated, device, written=[1, 2]) == ["launch do a", "count 2"]


def test_while_the_caller_records_work_is_done_as_it_is(device: Device) -> None:
    repeated = RepeatedWork(device)
    for _ in range(3):
        run(repeated, device)
    assert not repeated.is_paused
    device.stream = None
    assert run(repeated, device) == ["do a"]
    assert repeated.is_paused


def test_what_cannot_be_recorded_is_done_as_it_is_for_good_and_said_once(device: Device) -> None:
    repeated = RepeatedWork(device)
    run(repeated, device)
    device.refuses = True
    with pytest.warns(RuntimeWarning, match=r"'a' cannot be recorded.*RuntimeError: it waits") as said:
        assert run(repeated, device) == ["do a"]
    assert len(said) == 1
    assert said[0].filename == __file__
    device.refuses = False
    for _ in range(3):
        assert run(repeated, device) == ["do a"]
    assert device.num_first == 1
    # Others are recorded, or fail in silence.
    assert [run(repeated, device, "b") for _ in range(2)] == [["do b"], ["record", "launch do b"]]
    device.refuses = True
    assert [run(repeated, device, "c") for _ in range(2)] == [["do c"], ["do c"]]
    assert repeated.failures == {"a": "RuntimeError: it waits", "c": "RuntimeError: it waits"}


def test_an_error_of_the_work_itself_is_told_when_it_is_done_as_it_is(device: Device) -> None:
    repeated = RepeatedWork(device)
    run(repeated, device)

    def wrong() -> None:
        raise ValueError("wrong")

    with pytest.warns(RuntimeWarning, match="wrong"), pytest.raises(ValueError, match="wrong"):
        repeated.run("a", (), wrong)


def test_beyond_the_most_that_are_kept_what_is_in_use_stays_and_the_rest_is_done_as_it_is(
    device: Device,
) -> None:
    repeated = RepeatedWork(device, most_kept=2)
    for _ in range(3):
        turn = [run(repeated, device, name) for name in "abc"]
    for _ in range(20):
        assert [run(repeated, device, name) for name in "abc"] == turn
    assert turn == [["launch do a"], ["launch do b"], ["do c"]]
    assert device.num_first == 3 and not [each for each in device.log if each.startswith("drop")]


def test_records_go_together_when_one_has_not_come_for_long_and_the_device_has_ended_all(
    device: Device,
) -> None:
    repeated = RepeatedWork(device, most_kept=2, most_remembered=4)
    for name in "aabb":
        run(repeated, device, name)
    marks = {kept.record.name: kept.record.marked for kept in repeated._records.values()}
    # Memory lies elsewhere now for a; b goes on.
    while "launch do b" in run(repeated, device, "b"):
        assert run(repeated, device, "c") == ["do c"]
    # It has begun anew, with none recorded while one of the old ones is there: torch frees what they share with each of them.
    assert not repeated._records
    marks["do a"].is_reached = True
    assert run(repeated, device, "b") == ["drop do a", "do b"]
    assert run(repeated, device, "c") == ["do c"]
    marks["do b"].is_reached = True
    num_first = device.num_first
    assert run(repeated, device, "b") == ["drop do b", "do b"]
    assert run(repeated, device, "c") == ["do c"]
    # Libraries take their workspaces anew before anything is recorded.
    assert device.num_first == num_first + 2
    assert run(repeated, device, "b") == ["record", "launch do b"]
    assert run(repeated, device, "c") == ["record", "launch do c"]


def test_a_name_that_could_not_be_recorded_is_not_tried_again_on_other_memory(device: Device) -> None:
    repeated = RepeatedWork(device)
    run(repeated, device, "a", 1)
    device.refuses = True
    with pytest.warns(RuntimeWarning, match="cannot be recorded"):
        run(repeated, device, "a", 1)
    device.refuses = False
    for _ in range(3):
        assert run(repeated, device, "a", 2) == ["do a"]


def test_only_so_many_works_are_remembered(device: Device) -> None:
    repeated = RepeatedWork(device, most_remembered=3)
    for name in "abcd":
        run(repeated, device, name)
    assert run(repeated, device, "a") == ["do a"]
    assert run(repeated, device, "d") == ["record", "launch do d"]


def test_where_nothing_is_recorded_work_is_done_as_it_is(device: Device) -> None:
    repeated = WorkAsItIs()
    for _ in range(3):
        start = len(device.log)
        repeated.run("a", [object()], lambda: device.log.append("do a"))
        assert device.log[start:] == ["do a"]
    assert repeated.num_launched == 0 and not repeated.failures and not repeated.is_paused
