"""AutogradOps: gradients of leaves, hooks on gradients, callbacks of a backward."""

from __future__ import annotations

import numpy as np
import pytest


def test_a_gradient_is_put_in_place_and_cleared(platform, make, leaf, equal):
    x = leaf([1.0, 2.0])
    gradient = make([5.0, 6.0])
    platform.set_grad(x, gradient)
    equal(platform.get_grad(x), [5.0, 6.0])
    platform.backward([platform.sum(x)])
    equal(platform.get_grad(x), [6.0, 7.0])
    platform.set_grad(x, None)
    assert platform.get_grad(x) is None
    platform.backward([platform.sum(x)])
    equal(platform.get_grad(x), [1.0, 1.0])


def test_the_same_gradient_is_the_same_object(platform, make, leaf, equal):
    x, other = leaf([1.0, 2.0]), leaf([1.0, 2.0])
    platform.backward([platform.sum(x * x + other)])
    assert platform.get_grad(x) is platform.get_grad(x)
    assert platform.get_grad(x) is not platform.get_grad(other)
    first = platform.get_grad(x)
    put = make([5.0, 6.0])
    platform.set_grad(x, put)
    assert platform.get_grad(x) is put
    assert platform.get_grad(x) is not first
    platform.backward([platform.sum(x)])
    equal(platform.get_grad(x), [6.0, 7.0])
    platform.set_grad(x, None)
    assert platform.get_grad(x) is None
    platform.backward([platform.sum(x)])
    equal(platform.get_grad(x), [1.0, 1.0])
    empty = leaf(np.zeros((0, 2), "float32"))
    platform.backward([platform.sum(empty)])
    assert platform.get_grad(empty) is platform.get_grad(empty)


# --- hooks
def test_a_tensor_hook_sees_and_replaces_the_complete_gradient(platform, leaf, equal):
    x, seen = leaf([1.0, 2.0]), []
    middle = x * 2
    handle = platform.register_tensor_hook(middle, lambda grad: seen.append(platform.to_numpy(grad).tolist()))
    platform.register_tensor_hook(x, lambda grad: grad * 100)
    platform.backward([platform.sum(middle) + platform.sum(middle * 3)])
    assert seen == [[4.0, 4.0]]
    equal(platform.get_grad(x), [800.0, 800.0])
    handle.remove()
    platform.backward([platform.sum(x)])
    assert len(seen) == 1


def test_a_removed_tensor_hook_is_silent(platform, leaf, equal):
    x, seen = leaf([1.0]), []
    handle = platform.register_tensor_hook(x, seen.append)
    handle.remove()
    handle.remove()
    platform.backward([platform.sum(x * 2)])
    assert seen == []
    equal(platform.get_grad(x), [2.0])


def test_a_post_accumulate_hook_runs_once_per_backward_after_the_gradient_is_complete(platform, make, equal):
    parameter, seen = platform.parameter(make([1.0, 2.0])), []

    def hook(leaf):
        seen.append((leaf is parameter, platform.to_numpy(platform.get_grad(leaf)).tolist()))

    handle = platform.register_post_accumulate_grad_hook(parameter, hook)
    platform.backward([platform.sum(parameter * 2) + platform.sum(parameter * 3)])
    platform.backward([platform.sum(parameter)])
    assert seen == [(True, [5.0, 5.0]), (True, [6.0, 6.0])]
    handle.remove()
    platform.backward([platform.sum(parameter)])
    assert len(seen) == 2


def test_a_post_accumulate_hook_may_take_the_gradient_away(platform, make):
    parameter, taken = platform.parameter(make([1.0])), []

    def hook(leaf):
        taken.append(platform.to_numpy(platform.get_grad(leaf)).tolist())
        platform.set_grad(leaf, None)

    platform.register_post_accumulate_grad_hook(parameter, hook)
    for _ in range(2):
        platform.backward([platform.sum(parameter * 4)])
        assert platform.get_grad(parameter) is None
    assert taken == [[4.0], [4.0]]


def test_a_callback_runs_when_the_backward_has_finished(platform, leaf, equal):
    x, y, order = leaf([1.0]), leaf([1.0]), []

    def at_the_end():
        order.append(("end", platform.get_grad(x) is not None, platform.get_grad(y) is not None))

    def hook(grad):
        order.append("hook")
        platform.queue_backward_callback(at_the_end)

    middle = x * 2
    platform.register_tensor_hook(middle, hook)
    platform.backward([platform.sum(middle) + platform.sum(y)])
    assert order == ["hook", ("end", True, True)]
    platform.backward([platform.sum(x)])
    assert len(order) == 2


def test_what_is_before_a_function_that_gives_no_gradient_is_walked_or_that_is_told(platform, leaf, lacks):
    walked = []

    def passes(ctx, x):
        ctx.set_materialize_grads(False)
        return x

    def is_walked(ctx, gradient):
        walked.append(gradient)
        return gradient

    parts = {"forward": staticmethod(passes), "backward": staticmethod(is_walked)}
    first = type("First", (platform.Function,), parts)
    ends = {
        "forward": staticmethod(lambda ctx, x: x * 1),
        "backward": staticmethod(lambda ctx, gradient: None),
    }
    last = type("Last", (platform.Function,), ends)
    platform.backward([platform.sum(last.apply(first.apply(leaf([1.0]))))])
    assert walked == ([] if lacks("undefined_gradients") else [None])


def test_whether_a_graph_is_walked_now_is_known(platform, leaf):
    seen = []
    x = leaf([1.0])
    y = x * 2
    platform.register_tensor_hook(y, lambda grad: seen.append(platform.is_in_backward()))
    assert platform.is_in_backward() is False
    platform.backward([platform.sum(y)])
    assert seen == [True]
    assert platform.is_in_backward() is False


def test_a_callback_outside_of_a_backward_is_refused(platform):
    with pytest.raises(RuntimeError, match="outside of a backward"):
        platform.queue_backward_callback(lambda: None)
