"""Writes really write: into every kind of view, of every dtype, under every alias."""

from __future__ import annotations

import numpy as np
import pytest

DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8"),
    *("uint8", "uint16", "uint32", "uint64", "bool"),
)
VIEWS = {
    "whole": lambda p, b: b,
    "detached": lambda p, b: p.detach(b),
    "flat": lambda p, b: p.reshape(b, (12,)),
    "first rows": lambda p, b: p.narrow(b, 0, 0, 2),
    "middle rows": lambda p, b: p.narrow(b, 0, 1, 2),
    "columns": lambda p, b: p.narrow(b, 1, 1, 2),
    "turned": lambda p, b: p.transpose(b, 0, 1),
    "piece of a split": lambda p, b: p.split(b, (1, 3))[1],
    "view of a view": lambda p, b: p.reshape(p.narrow(p.reshape(b, (12,)), 0, 3, 6), (2, 3)),
    "one element": lambda p, b: p.reshape(p.narrow(p.reshape(b, (12,)), 0, 5, 1), ()),
    "nothing": lambda p, b: p.narrow(b, 0, 2, 0),
}


class OfNumpy:
    """The same views of a numpy array."""

    detach = staticmethod(lambda x: x)
    reshape = staticmethod(np.reshape)
    transpose = staticmethod(np.swapaxes)
    split = staticmethod(lambda x, sizes: np.split(x, np.cumsum(sizes)[:-1]))

    @staticmethod
    def narrow(x, dim, start, length):
        return x[(slice(None),) * dim + (slice(start, start + length),)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", VIEWS)
def test_a_write_into_a_view_reaches_the_base_and_no_more(platform, dtype, kind):
    base, alias = platform.zeros((4, 3), dtype), None
    alias = platform.detach(base)
    view = VIEWS[kind](platform, base)
    expected = np.zeros((4, 3), "float32")
    part = VIEWS[kind](OfNumpy, expected)
    numbers = (np.arange(part.size).reshape(part.shape) % (2 if dtype == "bool" else 100)).astype("float32")
    address = platform.data_ptr(base)
    assert platform.copy_(view, platform.tensor(numbers)) is view
    np.copyto(part, numbers)
    for seen in (base, alias):
        np.testing.assert_array_equal(platform.to_numpy(seen).astype("float32"), expected)
    assert platform.data_ptr(base) == address


def test_copying_a_tensor_onto_part_of_itself_reads_first(platform):
    x = platform.arange(0, 6)
    platform.copy_(platform.narrow(x, 0, 1, 5), platform.narrow(x, 0, 0, 5))
    assert platform.to_numpy(x).tolist() == [0, 0, 1, 2, 3, 4]


def test_a_value_that_does_not_fit_is_refused(platform):
    for shape in ((2, 2), (1, 2, 3), (3,)):
        with pytest.raises(ValueError, match=r"cannot be written into a tensor of shape \(3, 2\)"):
            platform.copy_(platform.zeros((3, 2)), platform.zeros(shape))
    with pytest.raises(ValueError, match=r"shape \(0, 3\)"):
        platform.copy_(platform.zeros((0, 3)), platform.zeros((2, 3)))


def test_python_numbers_keep_the_digits_of_float64(platform):
    x = platform.full((2,), 0.1, "float64")
    platform.add_(x, 0.3, alpha=0.7)
    platform.mul_(x, 1.1)
    assert platform.to_numpy(x).tolist() == [(0.1 + 0.3 * 0.7) * 1.1] * 2
    platform.fill_(x, 1 / 3)
    assert platform.to_numpy(x).tolist() == [1 / 3] * 2
    counts = platform.full((1,), 2**60 + 1, "int64")
    platform.add_(counts, 1)
    assert platform.to_numpy(counts).tolist() == [2**60 + 2]


def test_parameters_may_live_in_one_flat_buffer(platform):
    flat = platform.zeros((10,))
    first, second = platform.parameter(platform.zeros((4, 4))), platform.parameter(flat)
    platform.set_data_(first, platform.reshape(platform.narrow(flat, 0, 0, 6), (2, 3)))
    platform.set_data_(second, platform.narrow(flat, 0, 6, 4))
    platform.fill_(first, 1.0)
    platform.fill_(second, 2.0)
    assert platform.to_numpy(flat).tolist() == [1.0] * 6 + [2.0] * 4
    platform.copy_(flat, platform.cast(platform.arange(0, 10), "float32"))
    assert platform.to_numpy(first).tolist() == [[0, 1, 2], [3, 4, 5]]
    platform.backward([platform.sum(first * 3) + platform.sum(second)])
    assert platform.to_numpy(platform.get_grad(first)).tolist() == [[3.0] * 3] * 2
    assert platform.to_numpy(platform.get_grad(second)).tolist() == [1.0] * 4


def test_hooks_and_gradients_follow_a_parameter_to_other_memory(platform):
    parameter, seen = platform.parameter(platform.zeros((4,))), []
    platform.register_post_accumulate_grad_hook(parameter, lambda leaf: seen.append(tuple(leaf.shape)))
    platform.set_data_(parameter, platform.full((2, 2), 3.0))
    platform.backward([platform.sum(parameter * parameter)])
    assert seen == [(2, 2)]
    assert platform.to_numpy(platform.get_grad(parameter)).tolist() == [[6.0, 6.0]] * 2


def test_memory_refilled_before_backward_gives_the_gradient(platform):
    x = platform.set_requires_grad_(platform.tensor([1.0, 2.0], "float64"), True)
    w = platform.tensor([3.0, 4.0], "float64")
    out = platform.sum(x * w)
    platform.resize_storage_(w, 0)
    platform.resize_storage_(w, 16)
    with platform.preserve_version([w]):
        platform.copy_(w, platform.tensor([3.0, 4.0], "float64"))
    platform.backward([out])
    assert platform.to_numpy(platform.get_grad(x)).tolist() == [3.0, 4.0]
