"""TensorOps: dtypes, creation, casts, movement between device and host."""

from __future__ import annotations

import math

import numpy as np
import pytest

NUMPY_DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
DTYPES = (*NUMPY_DTYPES, "bfloat16")
NUMBERS = np.arange(6).reshape(2, 3)


# --- dtypes
@pytest.mark.parametrize("name", DTYPES)
def test_a_dtype_is_found_by_its_name_and_tells_it(platform, name):
    dtype = platform.dtype(name)
    assert platform.dtype_name(dtype) == name
    assert platform.dtype(dtype) == dtype
    assert platform.itemsize(dtype) == (2 if name == "bfloat16" else np.dtype(name).itemsize)
    assert platform.itemsize(name) == platform.itemsize(dtype)
    assert platform.is_floating(dtype) == ("float" in name)


@pytest.mark.parametrize("wrong", ["float31", "", "torch.float32"])
def test_an_unknown_dtype_is_refused(platform, wrong):
    with pytest.raises(ValueError, match="unknown dtype") as caught:
        platform.dtype(wrong)
    assert repr(wrong) in str(caught.value)


# --- creation
@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_a_tensor_keeps_the_values_and_dtype_of_a_numpy_array(platform, make, equal, name):
    array = NUMBERS.astype(name)
    x = make(array)
    assert isinstance(x, platform.Tensor)
    assert platform.is_tensor(x)
    assert platform.dtype_name(x.dtype) == name
    assert (tuple(x.shape), x.ndim) == ((2, 3), 2)
    equal(x, array)


@pytest.mark.parametrize(
    ("data", "dtype"), [(1.5, "float32"), ([[1, 2]], "int64"), ([True], "bool"), ([], "float32")]
)
def test_numbers_and_lists_become_tensors_of_the_usual_dtypes(platform, make, equal, data, dtype):
    x = make(data)
    assert platform.dtype_name(x.dtype) == dtype
    equal(x, np.array(data))


def test_a_tensor_owns_its_data(make, equal):
    array = NUMBERS.astype("float32")
    x = make(array)
    array[:] = -1
    equal(x, NUMBERS)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 3)])
def test_creation_fills_a_tensor_of_the_given_shape_and_dtype(platform, device, equal, name, shape):
    here = platform.device(device).current()
    empty = platform.empty(shape, name, device)
    assert (tuple(empty.shape), platform.dtype_name(empty.dtype), platform.device_of(empty)) == (
        shape,
        name,
        here,
    )
    equal(platform.zeros(shape, platform.dtype(name), device), np.zeros(shape))
    ones = platform.full(shape, 1, name, device)
    equal(ones, np.ones(shape))
    assert platform.dtype_name(ones.dtype) == name
    like = platform.zeros_like(ones)
    equal(like, np.zeros(shape))
    assert (platform.dtype_name(like.dtype), platform.device_of(like)) == (name, here)


def test_default_dtypes_are_float32_and_int64(platform, device, equal):
    for x in (
        platform.empty((2,), device=device),
        platform.full((2,), 3, device=device),
        platform.zeros((2,), device=device),
    ):
        assert platform.dtype_name(x.dtype) == "float32"
    counted = platform.arange(2, 6, device=device)
    assert platform.dtype_name(counted.dtype) == "int64"
    equal(counted, np.arange(2, 6))


def test_arange_may_be_empty_and_of_another_dtype(platform, device, equal):
    equal(platform.arange(3, 3, device=device), np.arange(0))
    x = platform.arange(0, 3, "float32", device)
    assert platform.dtype_name(x.dtype) == "float32"
    equal(x, np.arange(3))


def test_a_clone_has_memory_of_its_own(platform, make, equal):
    x = make(NUMBERS, "float32")
    copy = platform.clone(platform.transpose(x, 0, 1))
    assert platform.is_contiguous(copy)
    platform.fill_(x, -1.0)
    equal(copy, NUMBERS.T)


def test_a_meta_tensor_has_shape_and_dtype_but_no_memory(platform, lacks):
    if lacks("meta_tensors"):
        return
    x = platform.empty((1 << 20, 1 << 20), "float32", "meta")
    assert platform.device_of(x) == "meta"
    assert tuple(x.shape) == (1 << 20, 1 << 20)
    assert platform.dtype_name(x.dtype) == "float32"


# --- movement
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_a_cast_rounds_like_numpy(platform, make, equal, source, target):
    values = np.array([[0, 1, 2], [3, 100, 127]])
    if source == "bool":
        values = values.astype(bool)
    x = platform.cast(make(values, source), target)
    assert platform.dtype_name(x.dtype) == target
    equal(x, values.astype(bool) if target == "bool" else values)


def test_a_cast_to_the_same_dtype_is_the_tensor_itself(platform, make):
    x = make([1.0])
    assert platform.cast(x, "float32") is x


def test_casts_to_few_bits_round_to_nearest_even(platform, make, equal):
    x = make([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8], "float32")
    equal(platform.cast(x, "bfloat16"), [1.0, 1 + 2.0**-6, -1.0])
    y = make([1 + 2.0**-11, 1 + 3 * 2.0**-11], "float32")
    equal(platform.cast(y, "float16"), [1.0, 1 + 2.0**-9])


def test_a_cast_is_differentiable(platform, make, equal):
    x = platform.set_requires_grad_(make([1.0, 2.0], "float32"), True)
    platform.backward([platform.sum(platform.cast(x, "float16") * 2)])
    assert platform.dtype_name(platform.get_grad(x).dtype) == "float32"
    equal(platform.get_grad(x), [2.0, 2.0])


def test_a_tensor_moves_to_the_host_and_back(platform, device, make, equal):
    x = make(NUMBERS, "float32")
    host = platform.to_device(x, "cpu")
    assert platform.device_of(host) == "cpu"
    back = platform.to_device(host, device, non_blocking=True)
    platform.device(device).synchronize()
    assert platform.device_of(back) == platform.device_of(x) == platform.device(device).current()
    equal(back, NUMBERS)
    assert platform.to_device(x, device) is x


def test_to_numpy_copies(platform, make, equal):
    x = make(NUMBERS, "float32")
    platform.to_numpy(x)[:] = -1
    equal(x, NUMBERS)


def test_bfloat16_comes_to_numpy_as_float32_exactly(platform, make):
    array = platform.to_numpy(make([1.0, -0.0078125, 3.0e38], "bfloat16"))
    assert array.dtype == np.float32
    assert array[:2].tolist() == [1.0, -0.0078125]


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
@pytest.mark.parametrize("name", [*DTYPES, "complex64"])
def test_bits_leave_and_come_back_as_they_are(platform, device, make, name, shape):
    width = platform.itemsize(name)
    count = math.prod(shape)
    # Values of a single bit each, and the sign: no NaN, whose bits a copy may change.
    bits = np.array([0, 1, 1 << (8 * width - 1), 4, 8, 16], f"u{width}")[:count].reshape(shape)
    bits = np.asarray(bits & np.uint8(1)) if name == "bool" else bits
    x = platform.from_bits(bits.copy(), name, device)
    assert (tuple(x.shape), platform.dtype_name(x.dtype)) == (shape, name)
    assert platform.device_of(x) == platform.device(device).current()
    out = platform.to_bits(x)
    assert out.dtype == bits.dtype
    assert out.tobytes() == bits.tobytes()
    out[...] = 1
    assert platform.to_bits(x).tobytes() == bits.tobytes()


def test_bits_are_the_values_of_the_tensor_also_of_a_transposed_one(platform, make):
    x = make(NUMBERS, "float32")
    assert platform.to_bits(platform.transpose(x, 0, 1)).tobytes() == NUMBERS.T.astype("f4").tobytes()
    assert platform.to_bits(make([1.0, -2.0], "bfloat16")).tolist() == [0x3F80, 0xC000]


def test_bits_of_sixteen_bytes_are_refused(platform):
    with pytest.raises(ValueError, match="at most 8 bytes, got complex128 of 16"):
        platform.to_bits(platform.zeros((2,), "complex128", "cpu"))


@pytest.mark.parametrize("other", [1, None, np.zeros(2), [1.0], "tensor"])
def test_other_objects_are_no_tensors(platform, other):
    assert not platform.is_tensor(other)
