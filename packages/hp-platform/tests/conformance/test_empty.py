"""Operands without elements: what numpy gives, zeros to every operand, and a second backward that passes."""

from __future__ import annotations

import numpy as np
import pytest

EMPTY = (0, 3)


def ids(make, *shape):
    return make(np.zeros(shape, "int64"))


def attention(p, m, q, k, v):
    return p.scaled_dot_product_attention(q, k, v)


def causal(p, m, q, k, v):
    return p.scaled_dot_product_attention(q, k, v, is_causal=True)


# name of the case: (function of the platform, shapes of its operands, all ones; the result; gradients that are not zeros, by place)
CASES = {
    "sum of all": (lambda p, m, x: p.sum(x), [EMPTY], np.zeros(())),
    "sum over no elements": (lambda p, m, x: p.sum(x, 0), [EMPTY], np.zeros(3)),
    "sum, kept": (lambda p, m, x: p.sum(x, (0, 1), keepdim=True), [EMPTY], np.zeros((1, 1))),
    "sum to no elements": (lambda p, m, x: p.sum(x, -1), [EMPTY], np.zeros(0)),
    "sum over some dims": (lambda p, m, x: p.sum(x, (1, 2)), [(2, 0, 3)], np.zeros(2)),
    "mean of all": (lambda p, m, x: p.mean(x), [EMPTY], np.full((), np.nan)),
    "mean over no elements": (lambda p, m, x: p.mean(x, 0), [EMPTY], np.full(3, np.nan)),
    "mean to no elements": (lambda p, m, x: p.mean(x, 1, keepdim=True), [EMPTY], np.zeros((0, 1))),
    "matmul, no rows": (lambda p, m, x, y: p.matmul(x, y), [(0, 3), (3, 2)], np.zeros((0, 2))),
    "matmul, no columns": (lambda p, m, x, y: p.matmul(x, y), [(2, 3), (3, 0)], np.zeros((2, 0))),
    "matmul, nothing to contract": (lambda p, m, x, y: p.matmul(x, y), [(2, 0), (0, 3)], np.zeros((2, 3))),
    "matmul of vectors": (lambda p, m, x, y: p.matmul(x, y), [(0,), (0,)], np.zeros(())),
    "matmul, vector and matrix": (lambda p, m, x, y: p.matmul(x, y), [(0,), (0, 2)], np.zeros(2)),
    "matmul, matrix and vector": (lambda p, m, x, y: p.matmul(x, y), [(0, 2), (2,)], np.zeros(0)),
    "matmul, no batch": (lambda p, m, x, y: p.matmul(x, y), [(0, 2, 3), (0, 3, 2)], np.zeros((0, 2, 2))),
    "matmul, broadcast to no batch": (
        lambda p, m, x, y: p.matmul(x, y),
        [(1, 2, 3), (0, 3, 2)],
        np.zeros((0, 2, 2)),
    ),
    "matmul, batches of nothing to contract": (
        lambda p, m, x, y: p.matmul(x, y),
        [(2, 3, 0), (2, 0, 3)],
        np.zeros((2, 3, 3)),
    ),
    "linear, no rows": (lambda p, m, x, w: p.linear(x, w), [(2, 0, 3), (2, 3)], np.zeros((2, 0, 2))),
    "linear with bias, no rows": (
        lambda p, m, x, w, b: p.linear(x, w, b),
        [(0, 3), (2, 3), (2,)],
        np.zeros((0, 2)),
    ),
    "linear, no output": (lambda p, m, x, w, b: p.linear(x, w, b), [(2, 3), (0, 3), (0,)], np.zeros((2, 0))),
    "linear, nothing to contract": (lambda p, m, x, w: p.linear(x, w), [(2, 0), (3, 0)], np.zeros((2, 3))),
    "linear, the bias alone": (
        lambda p, m, x, w, b: p.linear(x, w, b),
        [(2, 0), (3, 0), (3,)],
        np.ones((2, 3)),
        {2: np.full(3, 2.0)},
    ),
    "embedding of no ids": (lambda p, m, w: p.embedding(ids(m, 2, 0), w), [(4, 3)], np.zeros((2, 0, 3))),
    "embedding of no width": (lambda p, m, w: p.embedding(ids(m, 2), w), [(4, 0)], np.zeros((2, 0))),
    "embedding of no ids in no rows": (lambda p, m, w: p.embedding(ids(m, 0), w), [EMPTY], np.zeros(EMPTY)),
    "softmax": (lambda p, m, x: p.softmax(x), [EMPTY], np.zeros(EMPTY)),
    "softmax over nothing": (lambda p, m, x: p.softmax(x, 0), [EMPTY], np.zeros(EMPTY)),
    "silu": (lambda p, m, x: p.silu(x), [EMPTY], np.zeros(EMPTY)),
    "relu": (lambda p, m, x: p.relu(x), [EMPTY], np.zeros(EMPTY)),
    "gelu": (lambda p, m, x: p.gelu(x), [EMPTY], np.zeros(EMPTY)),
    "rsqrt": (lambda p, m, x: p.rsqrt(x), [EMPTY], np.zeros(EMPTY)),
    "sqrt": (lambda p, m, x: p.sqrt(x), [EMPTY], np.zeros(EMPTY)),
    "exp": (lambda p, m, x: p.exp(x), [EMPTY], np.zeros(EMPTY)),
    "log": (lambda p, m, x: p.log(x), [EMPTY], np.zeros(EMPTY)),
    "cos": (lambda p, m, x: p.cos(x), [EMPTY], np.zeros(EMPTY)),
    "sin": (lambda p, m, x: p.sin(x), [EMPTY], np.zeros(EMPTY)),
    "cross entropy of no rows": (
        lambda p, m, x: p.cross_entropy(x, ids(m, 0)),
        [EMPTY],
        np.full((), np.nan),
    ),
    "attention, no batch": (attention, [(0, 2, 3, 4)] * 3, np.zeros((0, 2, 3, 4))),
    "attention, no heads": (causal, [(2, 0, 3, 4)] * 3, np.zeros((2, 0, 3, 4))),
    "attention, no length": (causal, [(1, 2, 0, 4)] * 3, np.zeros((1, 2, 0, 4))),
    "attention, no queries": (
        attention,
        [(1, 2, 0, 4), (1, 2, 3, 4), (1, 2, 3, 4)],
        np.zeros((1, 2, 0, 4)),
    ),
    "attention, no keys": (
        attention,
        [(1, 2, 3, 4), (1, 2, 0, 4), (1, 2, 0, 4)],
        np.zeros((1, 2, 3, 4)),
    ),
    "attention, no width": (causal, [(1, 2, 3, 4)] * 2 + [(1, 2, 3, 0)], np.zeros((1, 2, 3, 0))),
    "attention by no width": (
        attention,
        [(1, 1, 4, 0), (1, 1, 2, 0), (1, 1, 2, 3)],
        np.ones((1, 1, 4, 3)),
        {2: np.full((1, 1, 2, 3), 2.0)},
    ),
    "where": (lambda p, m, x, y: p.where(x > 0, x, y), [EMPTY, EMPTY], np.zeros(EMPTY)),
    "where, stretched": (lambda p, m, x, y: p.where(x > 0, x, y), [EMPTY, (1, 3)], np.zeros(EMPTY)),
    "where, from one number": (lambda p, m, x, y: p.where(x > 0, x, y), [EMPTY, ()], np.zeros(EMPTY)),
    "narrow": (lambda p, m, x: p.narrow(x, 0, 1, 0), [(2, 3)], np.zeros(EMPTY)),
    "split": (lambda p, m, x: p.split(x, (0, 2))[0], [(2, 3)], np.zeros(EMPTY)),
    "cat": (
        lambda p, m, x, y: p.cat([x, y, x]),
        [EMPTY, (2, 3)],
        np.ones((2, 3)),
        {1: np.ones((2, 3))},
    ),
    "cat of nothing": (lambda p, m, x, y: p.cat([x, y], 1), [EMPTY, EMPTY], np.zeros((0, 6))),
    "shapes": (
        lambda p, m, x: p.contiguous(p.reshape(p.transpose(p.clone(x), 0, 1), (1, 0, 3))),
        [EMPTY],
        np.zeros((1, 0, 3)),
    ),
    "operators": (lambda p, m, x, y: x * y + x / 2 - y * y + 1, [EMPTY, EMPTY], np.zeros(EMPTY)),
}


@pytest.fixture
def stale(platform, make):
    """Freed memory that is not zero, of the sizes that results and gradients here have: a kernel that writes nothing shows it."""

    def leave(dtype):
        for size in (1, 2, 3, 4, 6, 8, 9, 12, 18, 24):
            blocks = [make(np.full(size, 7.5), dtype) for _ in range(4)]
            assert len(blocks) == 4

    return leave


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_nothing_gives_what_numpy_gives_and_sends_zeros_back(
    platform, make, equal, lacks, stale, dtype, name
):
    if dtype == "float64" and lacks("float64_compute"):
        return
    function, shapes, expected, *rest = CASES[name]
    gradients = {place: np.zeros(shape) for place, shape in enumerate(shapes)} | (rest[0] if rest else {})
    leaves = [platform.set_requires_grad_(make(np.ones(shape), dtype), True) for shape in shapes]
    stale(dtype)
    # A gradient that is missing, rather than zero, would not pass the clones.
    output = function(platform, make, *[platform.clone(x) for x in leaves])
    equal(output, expected)
    assert platform.dtype_name(output.dtype) == dtype
    platform.backward([output], [make(np.ones(expected.shape), dtype)])
    for place, x in enumerate(leaves):
        equal(platform.get_grad(x), gradients[place])


# Attention by no width takes a softmax of numbers, of which MindSpore has no second derivative.
@pytest.mark.parametrize("name", [name for name in CASES if name != "attention by no width"])
def test_nothing_passes_a_second_backward(platform, make, equal, lacks, stale, name):
    if lacks("double_backward"):
        return
    function, shapes, expected, *_ = CASES[name]
    leaves = [platform.set_requires_grad_(make(np.ones(shape), "float32"), True) for shape in shapes]
    stale("float32")
    seed = platform.set_requires_grad_(make(np.ones(expected.shape), "float32"), True)
    output = function(platform, make, *leaves)
    first = platform.grad([output], leaves, [seed], create_graph=True)
    recorded = [x for x in first if platform.requires_grad(x)]
    if not recorded:
        return  # a gradient that depends on nothing
    starts = [make(np.zeros(tuple(x.shape)), "float32") for x in recorded]
    for x, found in zip(leaves, platform.grad(recorded, leaves, starts, allow_unused=True), strict=True):
        if found is not None:
            equal(found, np.zeros(tuple(x.shape)))


def test_no_integers_sum_to_zero(platform, make, equal, stale):
    stale("int64")
    equal(platform.sum(make(np.zeros(EMPTY, "int64"))), 0)


def test_nothing_is_recorded_of_nothing_under_no_grad(platform, make):
    x = platform.set_requires_grad_(make(np.zeros(EMPTY), "float32"), True)
    with platform.no_grad():
        assert not platform.requires_grad(platform.sum(x))
