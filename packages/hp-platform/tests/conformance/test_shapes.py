"""TensorOps: operations that move, choose and reduce elements."""

from __future__ import annotations

import numpy as np
import pytest

NUMBERS = np.arange(6).reshape(2, 3)


# --- shape
@pytest.mark.parametrize("name", ["float32", "int64", "bool", "bfloat16"])
def test_shape_operations_move_elements_like_numpy(platform, make, equal, name):
    array = np.arange(24).reshape(2, 3, 4) % (2 if name == "bool" else 24)
    x = make(array.astype(bool) if name == "bool" else array, name)
    equal(platform.reshape(x, (6, 4)), array.reshape(6, 4))
    equal(platform.reshape(x, (-1,)), array.reshape(-1))
    equal(platform.transpose(x, 0, 2), array.transpose(2, 1, 0))
    equal(platform.transpose(x, -1, 1), array.transpose(0, 2, 1))
    equal(platform.narrow(x, 1, 1, 2), array[:, 1:3])
    equal(platform.narrow(x, -1, 4, 0), array[..., 4:])
    for piece, expected in zip(platform.split(x, (1, 0, 2), 1), np.split(array, [1, 1], 1), strict=True):
        equal(piece, expected)
    equal(platform.cat([x, x], -1), np.concatenate([array, array], -1))


def test_reshape_of_a_transposed_tensor_is_in_row_major_order(platform, make, equal):
    x = platform.transpose(make(NUMBERS, "float32"), 0, 1)
    equal(platform.reshape(x, (6,)), NUMBERS.T.reshape(6))


def test_empty_pieces_are_cut_and_joined(platform, make, equal):
    x = make(NUMBERS, "float32")
    pieces = platform.split(x, (0, 2, 0))
    assert [tuple(p.shape) for p in pieces] == [(0, 3), (2, 3), (0, 3)]
    equal(platform.cat(pieces), NUMBERS)
    equal(platform.cat([pieces[0], pieces[2]]), np.zeros((0, 3)))
    equal(platform.reshape(pieces[0], (3, 0)), np.zeros((3, 0)))


def test_contiguous_keeps_values_and_returns_what_is_contiguous_as_it_is(platform, make, equal):
    x = make(NUMBERS, "float32")
    assert platform.is_contiguous(x)
    assert platform.contiguous(x) is x
    turned = platform.contiguous(platform.transpose(x, 0, 1))
    assert platform.is_contiguous(turned)
    equal(turned, NUMBERS.T)


def test_where_chooses_by_element(platform, make, equal):
    condition = make([[True, False, True], [False, False, True]])
    x, y = make(NUMBERS, "float32"), make([[-1.0]])
    equal(platform.where(condition, x, y), np.where(platform.to_numpy(condition), NUMBERS, -1.0))


def test_shape_operations_are_differentiable(platform, make, real, equal):
    x = platform.set_requires_grad_(make(NUMBERS, real), True)
    turned = platform.reshape(platform.transpose(platform.clone(x), 0, 1), (2, 3))
    first, second = platform.split(turned, (1, 1))
    joined = platform.cat([first * 2, platform.narrow(second, 1, 1, 2)], 1)
    chosen = platform.where(make(np.arange(5)[None] != 4), joined, joined * 10)
    platform.backward([platform.sum(platform.contiguous(chosen))])
    weights = np.array([2, 2, 2, 0, 1, 10]).reshape(3, 2).T
    equal(platform.get_grad(x), weights)


# --- along one dim
def test_the_largest_along_a_dim_is_nan_where_one_is(platform, make, real, equal):
    rows = np.array([[1.0, np.nan, 2.0], [3.0, -np.inf, 1.0], [5.0, 2.0, 5.0]])
    x = platform.set_requires_grad_(make(rows, real), True)
    largest = platform.amax(x, 1)
    assert not platform.requires_grad(largest)
    equal(largest, [np.nan, 3.0, 5.0])
    equal(platform.amax(x, 0, keepdim=True), [[5.0, np.nan, 5.0]])
    assert tuple(platform.amax(platform.zeros((0, 3), real), 1).shape) == (0,)


def test_elements_are_taken_and_added_along_a_dim(platform, make, real, equal):
    x = platform.set_requires_grad_(make(np.arange(12.0).reshape(2, 3, 2), real), True)
    index = make([[[2, 0]], [[1, 1]]], "int64")
    taken = platform.take_along(x, 1, index)
    equal(platform.detach(taken), [[[4.0, 1.0]], [[8.0, 9.0]]])
    platform.backward([platform.sum(taken * make([[[1.0, 2.0]], [[3.0, 4.0]]], real))])
    placed = np.array([[[0, 2], [0, 0], [1, 0]], [[0, 0], [3, 4], [0, 0]]])
    equal(platform.get_grad(x), placed)
    y = make(np.ones((2, 3, 2)), real)
    assert platform.add_along_(y, 1, index, make([[[1.0, 2.0]], [[3.0, 4.0]]], real)) is y
    equal(y, 1 + placed)
    none = platform.zeros((0, 1), "int64")
    assert tuple(platform.take_along(platform.zeros((0, 3), real), 1, none).shape) == (0, 1)
    empty = platform.zeros((0, 3), real)
    assert platform.add_along_(empty, 1, none, platform.zeros((0, 1), real)) is empty


@pytest.mark.parametrize(
    ("op", "expected"), [("sum", [1.0 + 2.0**-12, 6.0]), ("mean", [(1.0 + 2.0**-12) / 2, 3.0])]
)
def test_rows_are_reduced_in_the_dtype_of_the_result(platform, make, equal, op, expected):
    """The first sum needs 13 bits: float16 has 11."""
    x = make([9.0, 9.0, 9.0], "float32")
    target = (
        platform.narrow(x, 0, 0, 2)
        if platform.supports("write_into_view", platform.device_of(x))
        else make([9.0, 9.0])
    )
    platform.reduce_rows_(target, make([[1.0, 2.0], [2.0**-12, 4.0]], "float16"), op)
    equal(target, expected)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_a_row_that_lies_elsewhere_stands_for_one_that_is_not_read(platform, make, equal, op, at):
    rows = np.arange(15.0).reshape(3, 5)
    given = rows.copy()
    given[at] = np.nan
    target = make(np.full(5, 9.0), "float32")
    platform.reduce_rows_(target, make(given, "float16"), op, make(rows[at], "float16"), at)
    equal(target, getattr(rows, op)(0))
