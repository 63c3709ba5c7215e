"""TensorOps: the memory of tensors, and objects that stand for that of others."""

from __future__ import annotations

import numpy as np
import pytest

NUMBERS = np.arange(6).reshape(2, 3)


def test_storage_is_counted_in_bytes(platform, device):
    x = platform.zeros((5, 3), "float64", device)
    assert platform.storage_nbytes(x) == 120
    assert platform.storage_nbytes(platform.zeros((0, 3), "float32", device)) == 0


def test_memory_is_freed_and_comes_back_under_the_same_object(platform, make, equal, lacks):
    if lacks("storage_resize"):
        return
    x = make(NUMBERS, "float32")
    view = platform.reshape(x, (6,))
    platform.resize_storage_(x, 0)
    assert platform.storage_nbytes(x) == 0
    assert tuple(x.shape) == (2, 3)
    platform.resize_storage_(x, 24)
    assert platform.storage_nbytes(x) == 24
    platform.copy_(x, make(NUMBERS + 1, "float32"))
    equal(x, NUMBERS + 1)
    equal(view, np.arange(1, 7))


def test_the_address_tells_whether_two_tensors_alias(platform, make):
    x = make(NUMBERS, "float32")
    assert platform.data_ptr(platform.detach(x)) == platform.data_ptr(x)
    assert platform.data_ptr(platform.clone(x)) != platform.data_ptr(x)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "bool"])
def test_an_alias_is_a_tensor_of_its_own_over_a_part_of_anothers_memory(
    platform, device, make, equal, lacks, name
):
    if lacks("alias"):
        return
    base = platform.zeros((4, 3), name, device)
    part = platform.narrow(base, 0, 1, 2)
    alias = platform.alias(part)
    assert platform.data_ptr(alias) == platform.data_ptr(part)
    assert platform.storage_nbytes(alias) == 6 * platform.itemsize(name)
    assert (tuple(alias.shape), platform.device_of(alias)) == ((2, 3), platform.device_of(base))
    assert platform.dtype_name(alias.dtype) == name
    before = platform.version(base)
    platform.fill_(alias, 1.0)
    assert platform.version(base) == before
    equal(base, [[0] * 3, [1] * 3, [1] * 3, [0] * 3])
    del base, part
    equal(alias, np.ones((2, 3)))
    assert tuple(platform.alias(platform.zeros((0, 3), name, device)).shape) == (0, 3)


def test_an_alias_of_a_parameter_is_outside_of_the_graph_and_of_a_scattered_tensor_refused(
    platform, make, equal, lacks
):
    if lacks("alias"):
        return
    parameter = platform.parameter(make(NUMBERS, "float32"))
    alias = platform.alias(parameter)
    assert not platform.requires_grad(alias)
    equal(alias, NUMBERS)
    scattered = platform.narrow(parameter, 1, 0, 1)
    if not platform.is_contiguous(scattered):
        with pytest.raises(ValueError, match="contiguous"):
            platform.alias(scattered)


def test_an_object_stands_for_other_data(platform, make, equal):
    parameter = platform.parameter(make(NUMBERS, "float32"))
    other = make([1.0, 2.0], "float16")
    platform.set_data_(parameter, other)
    assert platform.is_parameter(parameter)
    assert platform.dtype_name(parameter.dtype) == "float16"
    equal(parameter, [1.0, 2.0])
    assert platform.data_ptr(parameter) == platform.data_ptr(other)
    x = make([0.0])
    platform.set_data_(x, platform.narrow(make(NUMBERS, "float32"), 0, 1, 1))
    equal(x, NUMBERS[1:])


def test_every_operation_sees_the_data_that_a_parameter_stands_for_now(platform, device) -> None:
    """Shape and values after set_data_ with another shape: no kernel may go by what the object was made with."""
    old, new = np.ones((6, 3), "float32"), np.arange(6, dtype="float32").reshape(2, 3) - 2
    x = platform.parameter(platform.tensor(old, device=device))
    platform.set_data_(x, platform.tensor(new, device=device))
    results = {
        "zeros_like": (platform.zeros_like(x), np.zeros((2, 3))),
        "clone": (platform.clone(x), new),
        "cast": (platform.cast(x, "float16"), new),
        "detach": (platform.detach(x), new),
        "reshape": (platform.reshape(x, (3, 2)), new.reshape(3, 2)),
        "transpose": (platform.transpose(x, 0, 1), new.T),
        "narrow": (platform.narrow(x, 0, 1, 1), new[1:2]),
        "split": (platform.split(x, [1, 1])[1], new[1:2]),
        "cat": (platform.cat([x, x]), np.concatenate([new, new])),
        "where": (platform.where(x > 0, x, x * 2), np.where(new > 0, new, new * 2)),
        "contiguous": (platform.contiguous(x), new),
        "plus": (x + x, new + new),
        "times": (x * 3, new * 3),
        "sum": (platform.sum(x), new.sum()),
        "mean": (platform.mean(x, 0), new.mean(0)),
        "matmul": (platform.matmul(x, platform.transpose(x, 0, 1)), new @ new.T),
        "linear": (platform.linear(x, x), new @ new.T),
        "embedding": (platform.embedding(platform.tensor([1, 0], device=device), x), new[[1, 0]]),
        "softmax": (platform.softmax(x), np.exp(new) / np.exp(new).sum(-1, keepdims=True)),
        "exp": (platform.exp(x), np.exp(new)),
        "relu": (platform.relu(x), np.maximum(new, 0)),
    }
    for name, (actual, expected) in results.items():
        assert tuple(actual.shape) == np.shape(expected), name
        found = platform.to_numpy(platform.detach(actual))
        # float32 kernels with their own exp; other data would be off by far more
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=name)
