"""AutogradOps: Functions with a gradient of their own."""

from __future__ import annotations

import numpy as np
import pytest


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
