"""NNOps: products of matrices, into given memory and in given dtypes."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.mark.parametrize(
    ("name", "wide"), [("float16", "float32"), ("float32", "float64"), ("float32", "float32")]
)
def test_a_product_in_a_wider_dtype_is_rounded_once(platform, make, near, lacks, name, wide):
    if wide == "float64" and lacks("float64_compute"):
        return
    random = np.random.default_rng(5)
    x, y = random.normal(size=(5, 70)).astype(name), random.normal(size=(70, 3)).astype(name)
    product = platform.matmul_in(platform.set_requires_grad_(make(x, name), True), make(y, name), wide)
    assert platform.dtype_name(product.dtype) == wide
    assert not platform.requires_grad(product)
    near(product, x.astype("float64") @ y.astype("float64"))


@pytest.mark.parametrize("shape", [(5, 7, 3), (1, 1, 1), (0, 7, 3), (5, 0, 3), (5, 7, 0)])
@pytest.mark.parametrize("batch", [(), (1,), (2,)])
@pytest.mark.parametrize("added", ["nothing", "itself", "a row"])
def test_a_product_is_written_into_a_part_of_a_tensor(platform, make, near, equal, real, shape, batch, added):
    n, k, m = shape
    random = np.random.default_rng(6)
    x, y = random.normal(size=(*batch, n, k)).astype(real), random.normal(size=(k, m)).astype(real)
    before, row = random.normal(size=(*batch, n + 2, m)).astype(real), random.normal(size=m).astype(real)
    whole = make(before, real)
    part = platform.narrow(whole, len(batch), 1, n)
    add = {"nothing": None, "itself": part, "a row": make(row, real)}[added]
    product = platform.matmul_into(part, platform.set_requires_grad_(make(x, real), True), make(y, real), add)
    assert product is part
    assert not platform.requires_grad(whole)
    extra = {"nothing": 0.0, "itself": before[..., 1 : n + 1, :], "a row": row}[added]
    near(part, x @ y + extra)
    equal(platform.narrow(whole, len(batch), 0, 1), before[..., :1, :])
    equal(platform.narrow(whole, len(batch), n + 1, 1), before[..., n + 1 :, :])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_of_halves_are_added_up_where_a_wider_dtype_is_wanted(platform, make, dtype):
    """2048 ones and one more are 2048 in float16, and 256 in bfloat16."""
    ones = make(np.ones((4, 2049)), dtype)
    out = make(np.full((4, 4), np.nan), "float32")
    turned = platform.transpose(ones, 0, 1)
    platform.matmul_into(out, ones, turned)
    assert platform.to_numpy(out).tolist() == [[2049.0] * 4] * 4
    platform.matmul_into(out, ones, turned, out)
    assert platform.to_numpy(out).tolist() == [[4098.0] * 4] * 4


@pytest.mark.parametrize("shape", [(5, 7, 3), (1, 1, 1), (0, 7, 3), (5, 0, 3), (5, 7, 0)])
@pytest.mark.parametrize("batch", [0, 1, 2])
@pytest.mark.parametrize("factors", [{}, {"beta": 4.0848}, {"alpha": -6.8946, "beta": 0.1}])
def test_a_product_of_batches_is_scaled_and_added(platform, make, near, real, shape, batch, factors):
    n, k, m = shape
    random = np.random.default_rng(8)
    add, x, y = (random.normal(size=(batch, *s)).astype(real) for s in ((n, m), (n, k), (k, m)))
    given = make(x, real)
    result = platform.matmul_add(
        make(add, real), platform.set_requires_grad_(given, True), make(y, real), **factors
    )
    assert platform.dtype_name(result.dtype) == real
    assert not platform.requires_grad(result)
    near(result, factors.get("beta", 1) * add + factors.get("alpha", 1) * (x @ y))


def test_batches_that_lie_transposed_are_multiplied_and_added(platform, make, near, real):
    x = np.random.default_rng(9).normal(size=(2, 3, 5)).astype(real)
    given = make(x, real)
    gram = platform.matmul(platform.transpose(given, 1, 2), given)
    near(platform.matmul_add(gram, gram, gram, alpha=2.0), (g := x.swapaxes(1, 2) @ x) + 2 * g @ g)
    near(platform.matmul_add(given, given, gram, beta=0.5), x / 2 + x @ g)


def test_products_are_made_in_the_dtype_of_their_operands(platform, make, real):
    for name in ("float32", "float16", real):
        x = make(np.ones((2, 2)), name)
        assert platform.product_dtype(x) == x.dtype


def test_a_product_takes_a_matrix_that_lies_transposed(platform, make, near, real):
    random = np.random.default_rng(7)
    x, w = random.normal(size=(2, 3, 4)).astype(real), random.normal(size=(5, 4)).astype(real)
    out = make(np.zeros((2, 6, 5)), real)
    platform.matmul_into(
        platform.narrow(out, 1, 3, 3), make(x, real), platform.transpose(make(w, real), 0, 1)
    )
    near(platform.narrow(out, 1, 3, 3), x @ w.T)
