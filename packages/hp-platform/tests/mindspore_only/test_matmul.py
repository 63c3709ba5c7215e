"""Matrix products of all small shapes, with their gradients, against numpy."""

from __future__ import annotations

import itertools

import numpy as np


def test_values_and_gradients_have_numpys_values_and_the_inputs_shapes(platform):
    rng = np.random.default_rng(0)
    checked = 0
    for ndim_x, ndim_y in itertools.product((1, 2, 3, 4), repeat=2):
        for shape_x in itertools.product((1, 2), repeat=ndim_x):
            for shape_y in itertools.product((1, 2), repeat=ndim_y):
                inner = shape_y[-2] if ndim_y > 1 else shape_y[-1]
                if shape_x[-1] != inner:
                    continue
                a, b = rng.standard_normal(shape_x), rng.standard_normal(shape_y)
                x, y = (platform.set_requires_grad_(platform.tensor(v), True) for v in (a, b))
                product = platform.matmul(x, y)
                expected = np.matmul(a, b)
                np.testing.assert_allclose(platform.to_numpy(product), expected, rtol=1e-13, atol=1e-13)
                seed = rng.standard_normal(expected.shape)
                found = platform.grad([product], [x, y], [platform.tensor(np.asarray(seed))])
                for grad, wanted in zip(found, numpy_gradients(a, b, seed), strict=True):
                    np.testing.assert_allclose(platform.to_numpy(grad), wanted, rtol=1e-13, atol=1e-13)
                checked = checked + 1
    assert checked > 200


def numpy_gradients(a, b, seed):
    rows, columns = a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b
    if a.ndim == 1:
        seed = np.expand_dims(seed, -1 if b.ndim == 1 else -2)
    if b.ndim == 1:
        seed = np.expand_dims(seed, -1)
    grad_a, grad_b = seed @ np.swapaxes(columns, -1, -2), np.swapaxes(rows, -1, -2) @ seed
    return summed_to(grad_a, rows.shape).reshape(a.shape), summed_to(grad_b, columns.shape).reshape(b.shape)


def summed_to(x, shape):
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    return x.sum(axis=tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)
