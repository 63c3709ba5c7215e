"""Tensors are found in whatever modules take and return."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest

from hp_platform.containers import map_tensors, tensors_in

Pair = namedtuple("Pair", "left right")


class Leaf(int):
    """Stands for a tensor."""


@dataclass(frozen=True)
class Answer:
    logits: Any
    note: str = "kept"
    cache: Any = field(default=None, init=False)


class Opaque:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


def is_leaf(x: Any) -> bool:
    return isinstance(x, Leaf)


def plus_ten(x: Leaf) -> Leaf:
    return Leaf(x + 10)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Leaf(1), 11),
        ([Leaf(1), "a", (Leaf(2), None)], [11, "a", (12, None)]),
        ({"x": Leaf(1), 3: [Leaf(2)]}, {"x": 11, 3: [12]}),
        (Pair(Leaf(1), "b"), Pair(11, "b")),
        (Answer(Leaf(1)), Answer(11)),
        (OrderedDict(b=Leaf(1), a=2), OrderedDict(b=11, a=2)),
        ((), ()),
        (None, None),
    ],
    ids=str,
)
def test_tensors_are_replaced_and_containers_keep_their_kind(value: Any, expected: Any) -> None:
    found = map_tensors(is_leaf, plus_ten, value)
    assert found == expected
    assert type(found) is type(value)
    assert [x + 10 for x in tensors_in(is_leaf, value)] == list(tensors_in(is_leaf, found))


def test_what_holds_no_tensor_keeps_its_identity() -> None:
    for value in ([1, 2], {"a": (1,)}, Answer("text"), Opaque(Leaf(1)), Leaf):
        assert map_tensors(is_leaf, plus_ten, value) is value


def test_a_mapping_keeps_what_else_it_carries() -> None:
    value = defaultdict(list, a=Leaf(1))
    found = map_tensors(is_leaf, plus_ten, value)
    assert found["a"] == 11
    assert found["new"] == []
    assert value["a"] == 1


def test_a_tensor_that_stands_twice_comes_twice() -> None:
    x = Leaf(4)
    assert list(tensors_in(is_leaf, [x, {"again": x}])) == [x, x]
