"""Which cases a test has, and which decorations are refused."""

from __future__ import annotations

import os
import re

import pytest

from hp_platform.testing import distributed
from hp_platform.testing.backends import Selection, known, prepare_worker, ranks_per_device
from hp_platform.testing.decorator import Case, cases, tag_of

pytestmark = pytest.mark.once


def cases_of(selection: Selection, *args, **kwargs) -> list[Case]:
    def function() -> None: ...

    tag = tag_of(distributed(*args, **kwargs)(function))
    assert tag is not None
    return cases(tag, selection)


def ids(selection: Selection, *args, **kwargs) -> list[str]:
    return [case.id + (" absent" if case.absence else "") for case in cases_of(selection, *args, **kwargs)]


def running(*names: str, devices: dict[str, int] | None = None, ranks_per_device: int = 1) -> Selection:
    return Selection(names, {}, frozenset(names), frozenset(), devices or {}, ranks_per_device)


def test_a_test_has_a_case_for_each_backend_of_the_run_and_each_size() -> None:
    assert ids(running("torch"), (1, 2, 4)) == ["torch-w1", "torch-w2", "torch-w4"]
    assert ids(running("torch", "mindspore"), 2) == ["torch-w2", "mindspore-w2"]
    assert ids(running("torch", "mindspore"), 2, backends="mindspore") == ["mindspore-w2"]


def test_slow_backends_run_two_ranks_unless_the_test_needs_more() -> None:
    assert ids(running("npu", "mindspore"), (1, 2, 4)) == ["npu-w1", "npu-w2", "mindspore-w1", "mindspore-w2"]
    assert ids(running("npu"), 4, min_world_size=3) == ["npu-w3"]
    assert ids(running("mindspore"), 4, min_world_size=4) == ["mindspore-w4"]


def test_more_ranks_than_devices_cannot_run() -> None:
    assert ids(running("cuda", devices={"cuda": 2}), (2, 4)) == ["cuda-w2", "cuda-w4 absent"]


def test_ranks_share_devices_where_the_run_says_so_and_the_backend_can() -> None:
    shared = running("cuda", "npu", devices={"cuda": 1, "npu": 1}, ranks_per_device=2)
    assert ids(shared, (1, 2, 3)) == [
        "cuda-w1",
        "cuda-w2",
        "cuda-w3 absent",
        "npu-w1",
        "npu-w2 absent",
    ]
    lacking = [case.absence for case in cases_of(shared, 3)]
    assert lacking == ["3 ranks need 2 devices, and there are 1", "2 ranks need 2 devices, and there are 1"]
    assert shared.header()[0].startswith("backends: cuda (1 devices, up to 2 ranks on each, nccl), npu (1 ")


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "two"])
def test_ranks_per_device_are_a_whole_number(text) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"HP_TEST_RANKS_PER_DEVICE={text!r}: give a whole number")
    ):
        ranks_per_device({"HP_TEST_RANKS_PER_DEVICE": text})


def test_a_worker_that_shares_its_device_is_a_host_of_its_own_to_nccl(monkeypatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "before")
    prepare_worker(known("cuda"), 1)
    assert os.environ["NCCL_HOSTID"] == "before"
    for variable in known("cuda").sharing:
        monkeypatch.setenv(variable, "before")  # so that it is as it was after this test
    monkeypatch.setenv("HP_TEST_RANKS_PER_DEVICE", "2")
    prepare_worker(known("cuda"), 1)
    assert os.environ["NCCL_HOSTID"] == "rank-1"


def test_an_absent_backend_is_told_only_if_the_run_names_it() -> None:
    absent = {"npu": "no such device"}
    assert ids(Selection(("torch",), absent, frozenset({"torch", "npu"}), frozenset(), {}), 2) == [
        "torch-w2",
        "npu-w2 absent",
    ]
    assert ids(Selection(("torch",), absent, frozenset(), frozenset(), {}), 2) == ["torch-w2"]
    assert ids(Selection(("torch",), absent, frozenset(), frozenset(), {}), 2, backends="npu") == [
        "npu-w2 absent"
    ]


def test_plain_processes_need_no_selection() -> None:
    assert ids(running("torch"), (2, 3), backends="plain") == ["plain-w2", "plain-w3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size=0: give a number of ranks, 1 or more"),
        ({"world_size": ()}, "world_size=(): give a number of ranks"),
        ({"world_size": (2, "4")}, "world_size=(2, '4')"),
        ({"world_size": True}, "world_size=True"),
        ({"backends": "gpu"}, "unknown backend 'gpu'; known ones are torch, cuda, npu, mindspore, plain"),
        ({"backends": ()}, "backends=() runs nowhere"),
        ({"timeout": 0}, "timeout=0: give the test a positive number of seconds"),
        ({"world_size": (1, 4), "min_world_size": 2}, "world_size=(1, 4) has sizes below min_world_size=2"),
    ],
)
def test_impossible_decorations_are_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        distributed(**arguments)


def test_forgotten_parentheses_and_classes_are_refused() -> None:
    with pytest.raises(ValueError, match="write @distributed\\(\\) with parentheses"):

        @distributed
        def test_x() -> None: ...

    with pytest.raises(ValueError, match="mark its methods instead"):

        @distributed()
        class TestX: ...
