"""NNOps: functional operations with their gradients, against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest


@pytest.mark.parametrize(
    ("name", "wide"), [("float32", None), ("float32", "float64"), ("float16", "float32")]
)
def test_a_norm_is_taken_over_dims_in_the_dtype_that_is_asked_for(
    platform, make, near, equal, lacks, name, wide
):
    if wide == "float64" and lacks("float64_compute"):
        return
    x = np.random.default_rng(10).normal(size=(3, 4, 5)).astype(name)
    expected = np.sqrt((x.astype("float64") ** 2).sum((1, 2)))
    given = platform.set_requires_grad_(make(x, name), True)
    norm = platform.norm(given, (1, 2), dtype=wide)
    assert platform.dtype_name(norm.dtype) == (wide or name)
    assert not platform.requires_grad(norm)
    near(norm, expected)
    near(platform.norm(given, (1, 2), keepdim=True, dtype=wide), expected[:, None, None])
    near(platform.norm(given, -1, dtype=wide), np.sqrt((x.astype("float64") ** 2).sum(-1)))
    equal(platform.norm(make(np.zeros((2, 0, 3)), name), (1, 2), dtype=wide), np.zeros(2))


# --- functional operations against numpy, their gradients against finite differences of the numpy function
def erf(x):
    return np.vectorize(math.erf)(x)


def np_softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def np_attention(q, k, v, causal):
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    return np_softmax(scores) @ v


TARGET = np.array([2, 0, 1])
IDS = np.array([[2, 0], [2, 3]])
POSITIVE = "positive"  # arguments are made positive
# name of the case: (function of the platform, the same in numpy, shapes of the differentiated arguments, options)
CASES = {
    "linear": (lambda p, m, x, w: p.linear(x, w), lambda x, w: x @ w.T, [(2, 3, 4), (5, 4)]),
    "linear with bias": (
        lambda p, m, x, w, b: p.linear(x, w, b),
        lambda x, w, b: x @ w.T + b,
        [(3, 4), (5, 4), (5,)],
    ),
    "linear of no rows": (lambda p, m, x, w: p.linear(x, w), lambda x, w: x @ w.T, [(0, 4), (5, 4)]),
    "matmul": (lambda p, m, x, y: p.matmul(x, y), np.matmul, [(3, 4), (4, 2)]),
    "matmul with broadcast batches": (
        lambda p, m, x, y: p.matmul(x, y),
        np.matmul,
        [(2, 1, 3, 4), (5, 4, 2)],
    ),
    "operator @": (lambda p, m, x, y: x @ y, np.matmul, [(2, 3, 4), (4, 2)]),
    "embedding": (lambda p, m, w: p.embedding(m(IDS), w), lambda w: w[IDS], [(4, 3)]),
    "softmax": (lambda p, m, x: p.softmax(x), np_softmax, [(3, 5)]),
    "softmax along dim 0": (lambda p, m, x: p.softmax(x, 0), lambda x: np_softmax(x, 0), [(3, 5)]),
    "silu": (lambda p, m, x: p.silu(x), lambda x: x / (1 + np.exp(-x)), [(3, 5)]),
    "relu": (lambda p, m, x: p.relu(x), lambda x: np.maximum(x, 0), [(3, 5)]),
    "gelu": (lambda p, m, x: p.gelu(x), lambda x: x * (1 + erf(x / math.sqrt(2))) / 2, [(3, 5)]),
    "rsqrt": (lambda p, m, x: p.rsqrt(x), lambda x: x**-0.5, [(3, 5)], POSITIVE),
    "sqrt": (lambda p, m, x: p.sqrt(x), np.sqrt, [(3, 5)], POSITIVE),
    "exp": (lambda p, m, x: p.exp(x), np.exp, [(3, 5)]),
    "log": (lambda p, m, x: p.log(x), np.log, [(3, 5)], POSITIVE),
    "cos": (lambda p, m, x: p.cos(x), np.cos, [(3, 5)]),
    "sin": (lambda p, m, x: p.sin(x), np.sin, [(3, 5)]),
    "sum of all": (lambda p, m, x: p.sum(x), np.sum, [(3, 5)]),
    "sum along a dim": (lambda p, m, x: p.sum(x, -1), lambda x: x.sum(-1), [(3, 5)]),
    "sum along dims, kept": (
        lambda p, m, x: p.sum(x, (0, 2), keepdim=True),
        lambda x: x.sum((0, 2), keepdims=True),
        [(2, 3, 4)],
    ),
    "sum of nothing": (lambda p, m, x: p.sum(x, 0), lambda x: x.sum(0), [(0, 3)]),
    "mean of all": (lambda p, m, x: p.mean(x), np.mean, [(3, 5)]),
    "mean along a dim, kept": (
        lambda p, m, x: p.mean(x, -1, keepdim=True),
        lambda x: x.mean(-1, keepdims=True),
        [(3, 5)],
    ),
    "mean along dims": (lambda p, m, x: p.mean(x, (0, 1)), lambda x: x.mean((0, 1)), [(2, 3, 4)]),
    "cross entropy": (
        lambda p, m, x: p.cross_entropy(x, m(TARGET)),
        lambda x: -np.mean(np.log(np_softmax(x))[np.arange(3), TARGET]),
        [(3, 4)],
    ),
    "attention": (
        lambda p, m, q, k, v: p.scaled_dot_product_attention(q, k, v),
        lambda q, k, v: np_attention(q, k, v, False),
        [(2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4)],
    ),
    "causal attention": (
        lambda p, m, q, k, v: p.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: np_attention(q, k, v, True),
        [(2, 2, 4, 4)] * 3,
    ),
    "operators": (
        lambda p, m, x, y: (x + y) * x - y / 2 + 1,
        lambda x, y: (x + y) * x - y / 2 + 1,
        [(2, 3), (3,)],
    ),
    "a slice": (lambda p, m, x: x[1:, ::2], lambda x: x[1:, ::2], [(3, 5)]),
}


def arguments(case):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in case[2]]
    return [np.abs(a) + 0.5 for a in arrays] if case[3:] == (POSITIVE,) else arrays


def differences(function, arrays, weights, step=1e-6):
    """Central differences of ``sum(weights * function(*arrays))``: exact to about ``step**2`` and 1e-16 / ``step``."""
    gradients = []
    for array in arrays:
        gradient = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            kept = array[index]
            values = []
            for shifted in (kept + step, kept - step):
                array[index] = shifted
                values.append(np.sum(weights * function(*arrays)))
            array[index] = kept
            gradient[index] = (values[0] - values[1]) / (2 * step)
        gradients.append(gradient)
    return gradients


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_function_and_its_gradients_equal_numpys(platform, make, near, lacks, dtype, name):
    if dtype == "float64" and lacks("float64_compute"):
        return
    function, reference = CASES[name][:2]
    arrays = arguments(CASES[name])
    inputs = [platform.set_requires_grad_(make(a, dtype), True) for a in arrays]
    output = function(platform, make, *inputs)
    assert platform.dtype_name(output.dtype) == dtype
    expected = reference(*arrays)
    near(output, expected)
    weights = np.random.default_rng(1).standard_normal(np.shape(expected))
    platform.backward([output], [make(weights, dtype)])
    for x, gradient in zip(inputs, differences(reference, arrays, weights), strict=True):
        # The differences themselves are good to 1e-9 of the largest value; float32 rounds at 1e-7 per operation.
        near(platform.get_grad(x), gradient, rtol=1e-7 if dtype == "float64" else 3e-5)


@pytest.mark.parametrize("name", ["linear", "matmul", "softmax", "silu", "gelu", "sum of all", "mean of all"])
def test_bfloat16_is_computed_to_its_precision(platform, make, near, lacks, name):
    if lacks("bfloat16_compute"):
        return
    function, reference = CASES[name][:2]
    tensors = [make(a, "bfloat16") for a in arguments(CASES[name])]
    output = function(platform, make, *tensors)
    assert platform.dtype_name(output.dtype) == "bfloat16"
    # Inputs are compared as rounded; 2**-8 per rounding, of at most three in a row.
    near(output, reference(*(platform.to_numpy(t).astype(np.float64) for t in tensors)), rtol=3 * 2.0**-8)


def test_integers_are_summed(platform, make, equal):
    equal(platform.sum(make([[1, 2], [3, 4]]), 0), [4, 6])


def test_cross_entropy_of_large_logits_does_not_overflow(platform, make, near):
    near(platform.cross_entropy(make([[1000.0, 0.0], [0.0, 1000.0]]), make([0, 0])), 500.0)
