"""AutogradOps: what is asked of many tensors at once, and memory whose writes do not count."""

from __future__ import annotations

import pytest


@pytest.fixture
def leaf(platform, make):
    """``leaf(data)``: a tensor that asks for its gradient."""
    return lambda data: platform.set_requires_grad_(make(data), True)


def test_lists_are_asked_as_each_tensor_is(platform, make, leaf):
    xs = [make([1.0]), leaf([2.0, 3.0]), leaf([])]
    platform.fill_(xs[1], 4.0)
    assert platform.requires_grads(xs) == [False, True, True]
    assert platform.versions(xs) == [platform.version(x) for x in xs]
    assert platform.requires_grads([]) == platform.versions([]) == platform.get_grads([]) == []


def test_gradients_are_put_and_taken_as_lists(platform, make, leaf, equal):
    xs = [leaf([1.0]), leaf([2.0, 3.0]), leaf([4.0])]
    given = [make([5.0]), None, make([6.0])]
    platform.set_grads(xs, given)
    assert [x is None for x in platform.get_grads(xs)] == [False, True, False]
    equal(platform.get_grad(xs[2]), [6.0])
    taken = platform.take_grads(xs)
    assert taken[1] is None
    equal(taken[0], [5.0])
    equal(taken[2], [6.0])
    assert platform.get_grads(xs) == [None, None, None]
    assert platform.take_grads(xs) == [None, None, None]
    with pytest.raises(ValueError, match="shorter"):
        platform.set_grads(xs, given[:1])


def test_gradients_of_a_backward_that_records_are_taken_outside_of_its_graph(platform, leaf, equal):
    x, factor = leaf([2.0]), leaf([3.0])
    platform.set_grads([x], [x * factor])
    (taken,) = platform.take_grads([x])
    assert not platform.requires_grad(taken)
    equal(taken, [6.0])


def test_writes_to_uncounted_memory_leave_what_was_saved_valid(platform, make, leaf, equal):
    weight, x = make([2.0, 3.0]), leaf([1.0, 1.0])
    y = platform.sum(x * weight)
    before = platform.version(weight)
    memory = platform.uncounted(weight)
    platform.fill_(memory, 0.0)
    equal(weight, [0.0, 0.0])
    platform.foreach_copy_([memory], [make([2.0, 3.0])])
    assert platform.version(weight) == before
    platform.backward([y])
    equal(platform.get_grad(x), [2.0, 3.0])
    assert not platform.requires_grad(platform.uncounted(x))
