"""AutogradOps: recording, backward, grad, hooks, callbacks, versions, and own Functions."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def leaf(platform, make):
    """``leaf(data)``: a tensor that asks for its gradient."""
    return lambda data: platform.set_requires_grad_(make(data), True)


# --- recording
def test_a_gradient_is_asked_for_and_no_more(platform, make):
    x = make([1.0])
    assert not platform.requires_grad(x)
    assert platform.set_requires_grad_(x, True) is x
    assert platform.requires_grad(x)
    platform.set_requires_grad_(x, False)
    assert not platform.requires_grad(x)


def test_leaves_are_told_from_results(platform, make, leaf):
    x = leaf([1.0])
    assert platform.is_leaf(x)
    assert platform.is_leaf(make([1.0]) * 2)
    assert not platform.is_leaf(x * 2)


def test_nothing_is_recorded_inside_no_grad(platform, leaf):
    x = leaf([1.0])
    assert platform.is_grad_enabled()
    with platform.no_grad():
        assert not platform.is_grad_enabled()
        assert not platform.requires_grad(x * 2)
        with platform.enable_grad():
            assert platform.is_grad_enabled()
            assert platform.requires_grad(x * 2)
        assert not platform.is_grad_enabled()
    assert platform.is_grad_enabled()
    assert platform.requires_grad(x * 2)


def test_what_is_made_inside_recordable_is_recorded_later(platform, leaf):
    x = leaf([1.0, 2.0])
    with platform.recordable():
        assert not platform.is_grad_enabled()
        kept = x * 3.0
        assert not platform.requires_grad(kept)
    assert platform.is_grad_enabled()
    platform.backward([platform.sum(x * kept)])
    assert platform.to_numpy(platform.get_grad(x)).tolist() == [3.0, 6.0]


def test_recording_comes_back_after_an_error_inside_no_grad(platform):
    with pytest.raises(KeyError), platform.no_grad():
        raise KeyError
    assert platform.is_grad_enabled()


def test_detach_gives_the_same_memory_outside_of_the_graph(platform, leaf, equal):
    x = leaf([1.0, 2.0])
    outside = platform.detach(x * 1)
    assert not platform.requires_grad(outside)
    assert platform.data_ptr(platform.detach(x)) == platform.data_ptr(x)
    platform.backward([platform.sum(x * outside)])
    equal(platform.get_grad(x), [1.0, 2.0])


# --- backward and grad
def test_backward_adds_to_the_gradients_of_leaves(platform, leaf, equal):
    x, unused = leaf([1.0, 2.0]), leaf([1.0])
    assert platform.get_grad(x) is None
    platform.backward([platform.sum(x * x)])
    equal(platform.get_grad(x), [2.0, 4.0])
    platform.backward([platform.sum(x * 3)])
    equal(platform.get_grad(x), [5.0, 7.0])
    assert platform.get_grad(unused) is None


def test_backward_starts_from_several_tensors_with_given_gradients(platform, make, leaf, equal):
    x = leaf([1.0, 2.0])
    platform.backward([x * 2, platform.sum(x)], [make([1.0, 10.0]), make(5.0)])
    equal(platform.get_grad(x), [7.0, 25.0])


def test_backward_of_a_tensor_that_is_no_scalar_wants_gradients(platform, leaf):
    x = leaf([1.0, 2.0])
    with pytest.raises(ValueError, match=r"\(2,\)"):
        platform.backward([x * 2])
    with pytest.raises(ValueError, match=r"\(2,\)"):
        platform.grad([x * 2], [x])
    assert platform.get_grad(x) is None


def test_a_retained_graph_is_walked_twice_and_another_is_not(platform, leaf, equal):
    x = leaf([3.0])
    y = platform.sum(x * x)
    platform.backward([y], retain_graph=True)
    platform.backward([y])
    equal(platform.get_grad(x), [12.0])
    with pytest.raises(RuntimeError):
        platform.backward([y])


def test_grad_returns_values_and_touches_no_attribute(platform, make, leaf, equal):
    x, y = leaf([1.0, 2.0]), leaf([3.0, 4.0])
    z = x * y
    gradients = platform.grad([z], [x, y], [make([1.0, 10.0])], retain_graph=True)
    assert isinstance(gradients, list)
    equal(gradients[0], [3.0, 40.0])
    equal(gradients[1], [1.0, 20.0])
    assert platform.get_grad(x) is None
    (again,) = platform.grad([platform.sum(z)], [x])
    equal(again, [3.0, 4.0])


def test_grad_of_results_in_the_middle(platform, leaf, equal):
    x = leaf([2.0])
    middle = x * 3
    (gradient,) = platform.grad([platform.sum(middle * middle)], [middle])
    equal(gradient, [12.0])


def test_an_unused_input_has_no_gradient_or_is_refused(platform, leaf):
    x, other = leaf([1.0]), leaf([1.0])
    y = platform.sum(x * 2)
    gradients = platform.grad([y], [x, other], retain_graph=True, allow_unused=True)
    assert gradients[1] is None
    with pytest.raises(RuntimeError):
        platform.grad([y], [x, other])


def test_second_derivatives(platform, leaf, equal, lacks):
    if lacks("double_backward"):
        return
    x = leaf([1.0, 2.0])
    (first,) = platform.grad([platform.sum(x * x * x)], [x], create_graph=True)
    equal(first, [3.0, 12.0])
    (second,) = platform.grad([platform.sum(first)], [x])
    equal(second, [6.0, 12.0])


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


def test_the_frameworks_own_casts_are_brought_back(platform, make):
    as_now = platform.autocast_state()
    x = make([[1.0]])
    with as_now():
        assert platform.matmul(x, x).dtype == x.dtype


def test_what_is_kept_of_a_watched_result_counts_the_writes_to_it(platform, device, make, equal, lacks):
    if lacks("operation_dispatch"):
        equal(platform.detach_watched(make([3.0])), [3.0])
        return
    kept = []

    def keeps(operation, args, kwargs):
        out = operation(*args, **kwargs)
        kept.append(platform.detach_watched(out))
        return out

    x = make([0.0])
    with platform.watch_operations(keeps):
        y = platform.exp(x)
    before = platform.version(kept[0])
    platform.mul_(y, 2.0)
    equal(kept[0], [2.0])
    assert platform.version(kept[0]) == before + 1


def test_casts_are_told_from_other_operations(platform, make, lacks):
    if lacks("operation_dispatch"):
        assert not platform.is_cast(platform.cast)
        return
    seen = []

    def note(operation, args, kwargs):
        seen.append(platform.is_cast(operation))
        return operation(*args, **kwargs)

    x = make([1.0])
    with platform.watch_operations(note):
        platform.exp(x)
        assert seen == [False]
        platform.cast(x, platform.dtype("float16"))
    assert True in seen


def test_operations_are_done_by_who_watches(platform, device, make, equal, lacks):
    if lacks("operation_dispatch"):
        assert not platform.operations_of(platform.exp)
        assert not platform.can_be_kept(platform.exp)
        with pytest.raises(NotImplementedError, match="operations below autograd"):
            platform.watch_operations(lambda operation, args, kwargs: None)
        return
    seen = []

    def twice(operation, args, kwargs):
        seen.append(str(operation))
        return operation(*args, **kwargs) * 2  # is not watched itself

    x = make([3.0])
    with platform.watch_operations(twice):
        y = platform.exp(x * 0)
    assert len(seen) == 2
    assert "exp" in seen[1]
    equal(y, [2.0])
    platform.exp(x)
    assert len(seen) == 2


def test_a_callback_outside_of_a_backward_is_refused(platform):
    with pytest.raises(RuntimeError, match="outside of a backward"):
        platform.queue_backward_callback(lambda: None)


def test_what_is_kept_for_backward_passes_through_the_hooks(platform, leaf, equal):
    x, packed, unpacked = leaf([3.0]), [], []

    def pack(tensor):
        packed.append(platform.to_numpy(tensor).tolist())
        return len(packed) - 1, tensor

    def unpack(kept):
        unpacked.append(kept[0])
        return kept[1]

    with platform.saved_tensors_hooks(pack, unpack):
        y = platform.sum(x * x)
    assert packed == [[3.0], [3.0]]
    assert unpacked == []
    platform.backward([y])
    assert sorted(unpacked) == [0, 1]
    equal(platform.get_grad(x), [6.0])
    platform.backward([platform.sum(x * x)])
    assert len(packed) == 2


# --- versions
def test_in_place_writes_are_counted(platform, make, lacks):
    x = make([1.0, 2.0])
    if lacks("version_counter"):
        platform.fill_(x, 1.0)
        assert platform.version(x) == 0
        return
    before = platform.version(x)
    platform.fill_(x, 1.0)
    platform.copy_(platform.detach(x), make([2.0, 3.0]))
    assert platform.version(x) == before + 2


def test_writes_that_keep_the_version_leave_what_was_saved_valid(platform, make, leaf, equal):
    weight = make([2.0, 3.0])
    x = leaf([1.0, 1.0])
    y = platform.sum(x * weight)
    before = platform.version(weight)
    with platform.preserve_version([weight]):
        platform.fill_(weight, 0.0)
        platform.copy_(weight, make([2.0, 3.0]))
    assert platform.version(weight) == before
    platform.backward([y])
    equal(platform.get_grad(x), [2.0, 3.0])


def test_a_write_to_what_was_saved_is_caught(platform, make, leaf, lacks):
    if lacks("version_counter"):
        return
    weight = make([2.0])
    y = platform.sum(leaf([1.0]) * weight)
    platform.fill_(weight, 0.0)
    with pytest.raises(RuntimeError):
        platform.backward([y])


# --- own functions
@pytest.fixture
def scaled_product(platform):
    """``apply(x, y, factor)``: ``x * y * factor`` and (not differentiable) the sign of it."""

    wanted: list[tuple[bool, ...]] = []

    class ScaledProduct(platform.Function):
        @staticmethod
        def forward(ctx, x, y, factor):
            ctx.save_for_backward(x, y)
            ctx.factor = factor
            product = x * y * factor
            sign = platform.cast(product > 0, "float32")
            ctx.mark_non_differentiable(sign)
            return product, sign

        @staticmethod
        def backward(ctx, grad, _):
            x, y = ctx.saved_tensors
            wanted.append(tuple(ctx.needs_input_grad))
            grad_x = grad * y * ctx.factor if ctx.needs_input_grad[0] else None
            grad_y = grad * x * ctx.factor if ctx.needs_input_grad[1] else None
            return grad_x, grad_y, None

    ScaledProduct.wanted = wanted
    return ScaledProduct


def test_a_function_defines_its_own_gradient(platform, make, leaf, equal, scaled_product):
    x, y = leaf([1.0, -2.0]), leaf([3.0, 4.0])
    product, sign = scaled_product.apply(x, y, 10.0)
    equal(product, [30.0, -80.0])
    equal(sign, [1.0, 0.0])
    assert platform.requires_grad(product)
    assert not platform.requires_grad(sign)
    platform.backward([product], [make([1.0, 2.0])])
    equal(platform.get_grad(x), [30.0, 80.0])
    equal(platform.get_grad(y), [10.0, -40.0])
    assert scaled_product.wanted == [(True, True, False)]


def test_a_function_is_told_which_gradients_are_needed(platform, make, leaf, equal, scaled_product):
    x = leaf([2.0])
    product, _ = scaled_product.apply(x, make([3.0]), 1.0)
    platform.backward([platform.sum(product)])
    equal(platform.get_grad(x), [3.0])
    assert scaled_product.wanted == [(True, False, False)]


def test_a_function_records_nothing_inside_no_grad(platform, leaf, scaled_product):
    with platform.no_grad():
        product, _ = scaled_product.apply(leaf([1.0]), leaf([2.0]), 1.0)
    assert not platform.requires_grad(product)


def test_the_backward_of_a_function_is_differentiable(platform, leaf, equal, lacks, scaled_product):
    if lacks("double_backward"):
        return
    x, y = leaf([2.0]), leaf([3.0])
    product, _ = scaled_product.apply(x, y, 10.0)
    (first,) = platform.grad([platform.sum(product)], [x], create_graph=True)
    equal(first, [30.0])
    (second,) = platform.grad([platform.sum(first)], [y])
    equal(second, [10.0])


def test_a_function_as_an_identity_whose_backward_communicates(platform, leaf, equal):
    class Doubled(platform.Function):
        @staticmethod
        def forward(ctx, x):
            return platform.reshape(x, tuple(x.shape))

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    x = leaf(np.ones((2, 2), "float32"))
    y = Doubled.apply(x)
    equal(y, np.ones((2, 2)))
    platform.backward([platform.sum(y * 3)])
    equal(platform.get_grad(x), np.full((2, 2), 6.0))
