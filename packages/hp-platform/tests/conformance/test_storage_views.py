"""Several tensors in one storage that is freed and got back as one: the memory of a unit's whole parameters."""

from __future__ import annotations

import numpy as np
import pytest

SHAPES = [(2, 3), (), (0, 4), (5,), (1, 1, 2)]
SIZES = [6, 1, 0, 5, 2]
TOTAL = 14


def pieces(numbers):
    """The numbers of each tensor, when they stand one after the other."""
    ends = np.cumsum(SIZES)[:-1]
    return [row.reshape(shape) for row, shape in zip(np.split(numbers, ends), SHAPES, strict=True)]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64", "int64", "bool"])
def test_tensors_lie_one_after_the_other_in_one_storage(platform, device, make, equal, lacks, name):
    if lacks("storage_views"):
        return
    base, views = platform.storage_views(SHAPES, name, device)
    itemsize = platform.itemsize(name)
    assert (tuple(base.shape), platform.dtype_name(base.dtype)) == ((TOTAL,), name)
    assert platform.storage_nbytes(base) == TOTAL * itemsize
    numbers = np.arange(TOTAL) % 2 == 0 if name == "bool" else np.arange(TOTAL)
    platform.copy_(base, make(numbers, name))
    start = 0
    for view, size, expected in zip(views, SIZES, pieces(numbers), strict=True):
        equal(view, expected)
        assert platform.dtype_name(view.dtype) == name
        assert platform.device_of(view) == platform.device_of(base)
        assert platform.is_contiguous(view)
        assert platform.is_leaf(view) and not platform.requires_grad(view)
        if size:
            assert platform.data_ptr(view) == platform.data_ptr(base) + start * itemsize
        start = start + size


def test_views_show_the_memory_that_the_storage_has_got_back(platform, device, make, equal, lacks):
    if lacks("storage_views"):
        return
    base, views = platform.storage_views(SHAPES, "float32", device)
    for round_ in range(3):
        platform.resize_storage_(base, 0)
        assert platform.storage_nbytes(base) == 0
        assert [tuple(view.shape) for view in views] == SHAPES
        elsewhere = platform.zeros((TOTAL,), "float32", device)  # takes the place that has become free
        platform.resize_storage_(base, 4 * TOTAL)
        numbers = np.arange(TOTAL) + 100.0 * round_
        platform.copy_(base, make(numbers, "float32"))
        for view, expected in zip(views, pieces(numbers), strict=True):
            equal(view, expected)
        equal(elsewhere, np.zeros(TOTAL))
        platform.fill_(views[3], -1.0)
        numbers[7:12] = -1.0
        equal(base, numbers)


def test_a_write_to_one_of_them_counts_for_this_one_only(platform, device, lacks):
    if lacks("storage_views") or lacks("version_counter"):
        return
    base, views = platform.storage_views(SHAPES, "float32", device)
    together = [base, *views]
    for i, x in enumerate(together):
        before = [platform.version(y) for y in together]
        platform.fill_(x, float(i))
        assert [platform.version(y) - v for y, v in zip(together, before, strict=True)] == [
            int(j == i) for j in range(len(together))
        ]


def test_what_autograd_saved_is_valid_after_the_memory_came_back(platform, device, make, equal, lacks):
    if lacks("storage_views"):
        return
    numbers = np.arange(1.0, 11.0)
    base, (weight, bias) = platform.storage_views([(4, 2), (2,)], "float32", device)
    platform.copy_(base, make(numbers, "float32"))
    for x in (weight, bias):
        platform.set_requires_grad_(x, True)
    x = platform.set_requires_grad_(make([[1.0, 2.0]], "float32"), True)
    y = platform.linear(x, weight)
    z = y * y
    platform.resize_storage_(base, 0)
    platform.resize_storage_(base, 40)
    platform.copy_(base, make(numbers, "float32"))
    platform.backward([platform.sum(z) + platform.sum(bias * bias)])
    w = numbers[:8].reshape(4, 2)
    seed = 2 * (w @ [1.0, 2.0])
    equal(platform.get_grad(x), [seed @ w])
    equal(platform.get_grad(weight), np.outer(seed, [1.0, 2.0]))
    equal(platform.get_grad(bias), 2 * numbers[8:])


def test_a_storage_of_no_tensors_or_without_memory(platform, device, lacks):
    if lacks("storage_views"):
        return
    base, views = platform.storage_views([], "float32", device)
    assert (tuple(base.shape), views) == ((0,), [])
    base, (view,) = platform.storage_views([(0, 3)], "float32", device)
    assert (tuple(base.shape), tuple(view.shape)) == ((0,), (0, 3))
    if lacks("meta_tensors"):
        return
    base, views = platform.storage_views([(2, 3), (4,)], None, "meta")
    assert [platform.device_of(x) for x in (base, *views)] == ["meta"] * 3
    assert [tuple(x.shape) for x in (base, *views)] == [(10,), (2, 3), (4,)]
    assert platform.dtype_name(base.dtype) == "float32"
