"""In which order backward runs what is ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def noted(platform) -> Callable[[Any, str, list[str]], Any]:
    """``noted(x, name, order)``: ``x`` behind a node that writes its name down when it runs."""

    def forward(ctx: Any, x: Any, name: str, order: list[str]) -> Any:
        ctx.name, ctx.order = name, order
        return platform.detach(x)

    def backward(ctx: Any, gradient: Any) -> Any:
        ctx.order.append(ctx.name)
        return gradient, None, None

    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    node = type("Noted", (platform.Function,), parts)
    return lambda x, name, order: node.apply(x, name, order)


def test_of_nodes_that_are_ready_that_runs_first_which_was_recorded_last(platform, leaf, noted, lacks):
    if lacks("backward_turns"):
        return
    order: list[str] = []
    made = [noted(leaf([1.0]), name, order) for name in "abc"]
    turns = [platform.backward_turn(x) for x in made]
    assert turns == sorted(set(turns))
    platform.backward([platform.sum(made[1] * made[2] * made[0])])
    assert order == ["c", "b", "a"]


def test_a_node_that_was_given_another_turn_runs_in_that(platform, leaf, noted, equal, lacks):
    x = leaf([3.0])
    order: list[str] = []
    made = [noted(x * 1, name, order) for name in "abcd"]
    if lacks("backward_turns"):
        with pytest.raises(NotImplementedError, match="supports"):
            platform.set_backward_turn(made[0], 1)
        with pytest.raises(NotImplementedError, match="supports"):
            platform.backward_turn(made[0])
        return
    turns = [platform.backward_turn(each) for each in made]
    platform.set_backward_turn(
        made[3], turns[0] - 1
    )  # that of what the first one is made of, which comes behind it
    platform.set_backward_turn(made[1], turns[2] + 1)
    assert platform.backward_turn(made[1]) == turns[2] + 1
    platform.backward([platform.sum(made[0] + made[1] + made[2] + made[3])])
    assert order == ["b", "c", "a", "d"]
    equal(platform.get_grad(x), [4.0])


def test_what_a_node_needs_comes_before_it_whatever_its_turn(platform, leaf, noted, equal, lacks):
    if lacks("backward_turns"):
        return
    order: list[str] = []
    x = leaf([2.0])
    first = noted(x, "first", order)
    last = noted(first * 2, "last", order)
    platform.set_backward_turn(first, platform.backward_turn(last) + 100)
    platform.backward([platform.sum(last)])
    assert order == ["last", "first"]
    equal(platform.get_grad(x), [2.0])


def test_a_leaf_has_no_turn(platform, leaf, lacks):
    if lacks("backward_turns"):
        return
    for ask in (platform.backward_turn, lambda x: platform.set_backward_turn(x, 1)):
        with pytest.raises(ValueError, match="no turn"):
            ask(leaf([1.0]))


def test_a_node_that_runs_is_known_by_its_name(platform, leaf, lacks):
    def forward(ctx: Any, x: Any) -> Any:
        return platform.detach(x)

    def backward(ctx: Any, gradient: Any) -> Any:
        names.append(platform.backward_operation())
        return gradient

    names: list[str | None] = []
    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    y = type("Noted", (platform.Function,), parts).apply(leaf([1.0]))
    assert platform.backward_operation() is None
    platform.backward([platform.sum(y)])
    assert names == [None if lacks("backward_turns") else "NotedBackward"]
    assert platform.backward_operation() is None
