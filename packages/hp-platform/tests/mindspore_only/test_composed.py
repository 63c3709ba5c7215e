"""Operations composed because MindSpore's CPU build has no kernel, or a wrong one, against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest

REAL = ("float32", "float64")
# Some tens of roundings at values of the order of 1.
RTOL = {"float32": 1e-5, "float64": 1e-13}


@pytest.fixture(scope="module")
def rng():
    return np.random.default_rng(0)


def gradients(platform, function, *arrays):
    """Value of ``sum(function * weights)`` and its gradients, all as numpy."""
    leaves = [platform.set_requires_grad_(platform.tensor(a), True) for a in arrays]
    out = function(*leaves)
    weights = np.cos(np.arange(math.prod(out.shape))).reshape(out.shape).astype(arrays[0].dtype)
    platform.backward([out], [platform.tensor(weights)])
    return platform.to_numpy(out), [platform.to_numpy(platform.get_grad(x)) for x in leaves], weights


def numeric(function, arrays, place, weights):
    """Central differences of ``sum(function * weights)`` with respect to one array, in float64."""
    arrays = [a.astype("float64") for a in arrays]
    found = np.zeros_like(arrays[place])
    step = 1e-6
    for at in np.ndindex(*found.shape):
        values = []
        for sign in (1, -1):
            moved = [a.copy() for a in arrays]
            moved[place][at] = moved[place][at] + sign * step
            values.append((function(*moved) * weights).sum())
        found[at] = (values[0] - values[1]) / (2 * step)
    return found


def agree(platform, ours, theirs, *arrays):
    """Value and every gradient; differences are right to 1e-8, so float32 is judged by its own rounding."""
    out, grads, weights = gradients(platform, ours, *arrays)
    dtype = str(arrays[0].dtype)
    np.testing.assert_allclose(
        out, theirs(*[a.astype("float64") for a in arrays]), rtol=RTOL[dtype], atol=RTOL[dtype]
    )
    for place, grad in enumerate(grads):
        assert grad.dtype == arrays[0].dtype
        expected = numeric(theirs, arrays, place, weights.astype("float64"))
        np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-5 if dtype == "float32" else 1e-8)


def softmax(x):
    shifted = np.exp(x - x.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


@pytest.mark.parametrize("dtype", REAL)
def test_cross_entropy(platform, rng, dtype):
    target = np.array([2, 0, 2, 3])

    def theirs(logits):
        return -np.log(softmax(logits))[np.arange(4), target].mean()

    ids = platform.tensor(target)
    agree(platform, lambda x: platform.cross_entropy(x, ids), theirs, rng.normal(size=(4, 5)).astype(dtype))


@pytest.mark.parametrize("dtype", REAL)
def test_cross_entropy_of_large_logits_stays_finite(platform, dtype):
    out, (grad,), _ = gradients(
        platform,
        lambda x: platform.cross_entropy(x, platform.tensor([1, 0])),
        np.array([[1e4, 0], [1e4, 0]], dtype),
    )
    assert out == 5e3
    np.testing.assert_array_equal(grad, np.array([[0.5, -0.5], [0, 0]]))


def test_cross_entropy_of_other_shapes_is_refused(platform):
    with pytest.raises(
        ValueError, match=r"logits \(rows, classes\) and target \(rows,\), got shapes \(2, 3\) and \(3,\)"
    ):
        platform.cross_entropy(platform.zeros((2, 3)), platform.zeros((3,), "int64"))


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(3, 3), (1, 4), (2, 5)])
def test_attention(platform, rng, dtype, is_causal, queries, keys):
    def theirs(q, k, v):
        scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
        if is_causal:
            scores = np.where(np.tri(queries, keys, dtype=bool), scores, -np.inf)
        return softmax(scores) @ v

    shapes = ((2, 1, queries, 2), (2, 1, keys, 2), (2, 1, keys, 2))
    agree(
        platform,
        lambda q, k, v: platform.scaled_dot_product_attention(q, k, v, is_causal=is_causal),
        theirs,
        *[rng.normal(size=shape).astype(dtype) for shape in shapes],
    )


@pytest.mark.parametrize("dtype", REAL)
def test_gelu_is_the_exact_form(platform, rng, dtype):
    def theirs(x):
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))

    agree(platform, platform.gelu, theirs, rng.normal(size=(3, 4)).astype(dtype))


@pytest.mark.parametrize("dtype", REAL)
def test_embedding_adds_up_the_gradients_of_a_row(platform, rng, dtype):
    ids = np.array([[0, 2, 0], [0, 1, 2]])
    agree(
        platform,
        lambda weight: platform.embedding(platform.tensor(ids), weight),
        lambda weight: weight[ids],
        rng.normal(size=(4, 2)).astype(dtype),
    )


def test_where_of_bfloat16_moves_values_exactly(platform):
    x, y = platform.tensor([1.0, 3.0], "bfloat16"), platform.tensor([-1.0, 2.0**-100], "bfloat16")
    chosen = platform.where(platform.tensor([True, False]), x, y)
    assert platform.dtype_name(chosen.dtype) == "bfloat16"
    np.testing.assert_array_equal(platform.to_numpy(chosen), np.array([1.0, 2.0**-100], np.float32))


@pytest.mark.parametrize(
    "name", ["matmul", "linear", "softmax", "sum", "mean", "exp", "silu", "gelu", "rsqrt"]
)
def test_computing_in_bfloat16_is_refused_at_the_call(platform, name):
    x = platform.zeros((2, 2), "bfloat16")
    with pytest.raises(
        NotImplementedError, match=r"in bfloat16: MindSpore 2\.10\.0 has no such kernel on cpu; cast to"
    ):
        getattr(platform, name)(*([x, x] if name in ("matmul", "linear") else [x]))
