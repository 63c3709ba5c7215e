"""Which cases a test has, and which decorations are refused."""

from __future__ import annotations

import re

import pytest

from hp_platform.testing import distributed
from hp_platform.testing.backends import Selection
from hp_platform.testing.decorator import cases, tag_of

pytestmark = pytest.mark.once


def ids(selection: Selection, *args, **kwargs) -> list[str]:
    def function() -> None: ...

    tag = tag_of(distributed(*args, **kwargs)(function))
    assert tag is not None
    return [case.id + (" absent" if case.absence else "") for case in cases(tag, selection)]


def running(*names: str, devices: dict[str, int] | None = None) -> Selection:
    return Selection(names, {}, frozenset(names), frozenset(), devices or {})


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
