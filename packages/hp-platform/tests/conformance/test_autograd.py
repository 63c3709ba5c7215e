"""AutogradOps: recording, backward, grad."""

from __future__ import annotations

import pytest


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
