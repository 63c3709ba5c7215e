"""TensorOps: dtypes, creation, movement, shape, storage, safe in-place writes, many tensors at once."""

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


# --- storage
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


# --- safe in-place writes
@pytest.mark.parametrize("name", DTYPES)
def test_in_place_writes_change_the_target(platform, make, equal, name):
    if name == "bool":
        x = make([True, False])
        assert platform.copy_(x, make([False, False])) is x
        equal(x, [False, False])
        platform.fill_(x, 1.0)
        equal(x, [True, True])
        return
    x = make([[1, 2, 3], [4, 5, 6]], name)
    alias = platform.detach(x)
    assert platform.copy_(x, make([[2, 4, 6]], "float32")) is x
    equal(alias, [[2, 4, 6]] * 2)
    assert platform.add_(x, make([1, 2, 3], name), alpha=2.0) is x
    equal(alias, [[4, 8, 12]] * 2)
    platform.add_(x, 1)
    equal(alias, [[5, 9, 13]] * 2)
    assert platform.mul_(x, 2) is x
    equal(alias, [[10, 18, 26]] * 2)
    platform.mul_(x, make([[1], [2]], name))
    equal(alias, [[10, 18, 26], [20, 36, 52]])
    assert platform.fill_(x, 7) is x
    equal(alias, np.full((2, 3), 7))


def test_in_place_writes_to_nothing_are_legal(platform, device, equal):
    x = platform.zeros((0, 3), "float32", device)
    platform.copy_(x, platform.zeros((0, 3), "float32", device))
    platform.add_(x, 1.0)
    platform.mul_(x, 2.0)
    platform.fill_(x, 1.0)
    equal(x, np.zeros((0, 3)))


def test_a_parameter_is_written_without_a_trace_in_the_graph(platform, make, equal):
    parameter = platform.parameter(make([1.0, 2.0]))
    source = platform.set_requires_grad_(make([3.0, 4.0]), True)
    platform.copy_(parameter, source * 2)
    platform.add_(parameter, source, alpha=-1.0)
    platform.mul_(parameter, 10.0)
    equal(parameter, [30.0, 40.0])
    assert platform.is_leaf(parameter)
    assert platform.requires_grad(parameter)
    platform.fill_(parameter, 5.0)
    platform.backward([platform.sum(parameter * 2)])
    equal(platform.get_grad(parameter), [2.0, 2.0])
    assert platform.get_grad(source) is None


def test_a_write_into_a_view_reaches_its_base(platform, device, equal, make, lacks):
    if lacks("write_into_view"):
        return
    base = platform.zeros((3, 2), "float32", device)
    platform.copy_(platform.narrow(base, 0, 1, 1), make([[1.0, 2.0]]))
    platform.copy_(platform.reshape(platform.narrow(base, 0, 2, 1), (2,)), make([3, 4], "int64"))
    equal(base, [[0, 0], [1, 2], [3, 4]])


def test_the_frameworks_own_in_place_arithmetic_changes_the_tensor(make, equal, lacks):
    if lacks("in_place_arithmetic"):
        return
    x = make([1.0, 2.0])
    x += 1
    equal(x, [2.0, 3.0])


# --- many tensors at once
def test_foreach_functions_do_what_the_single_ones_do(platform, make, equal):
    arrays = [
        NUMBERS.astype("float32"),
        np.zeros((0, 2), "float32"),
        np.array([1.0, 2.0], "float32"),
        np.float32(3.0),
    ]
    xs = [make(a) for a in arrays]
    aliases = [platform.detach(x) for x in xs]
    platform.foreach_mul_(xs, 2.0)
    platform.foreach_add_(xs, [make(a) for a in arrays], alpha=-3.0)
    for alias, array in zip(aliases, arrays, strict=True):
        equal(alias, -array)
    platform.foreach_copy_(xs, [make(a, "float16") for a in arrays])
    for alias, array in zip(aliases, arrays, strict=True):
        equal(alias, array)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_factor_that_is_a_tensor_is_not_rounded_to_the_dtype_of_the_list(
    platform, make, equal, dtype
) -> None:
    """A third is 0.33325 in float16: 3 times that is 0.99976, and rounds to another float16 than 1."""
    arrays = [np.array([3.0, 6.0, -9.0], "float32"), np.zeros((0, 2), "float32"), np.float32(12.0)]
    xs = [make(a, dtype) for a in arrays]
    platform.foreach_mul_(xs, make(1.0, "float32") / 3)
    for x, array in zip(xs, arrays, strict=True):
        equal(x, array / 3)
        assert platform.dtype_name(x.dtype) == dtype


def test_lists_that_are_too_long_to_be_widened_at_once_are_scaled_whole(platform, make, equal) -> None:
    """Each has more than 2^23 elements: three portions."""
    xs = [platform.full((2**23 + i,), 3.0, "bfloat16", platform.device_of(make(1.0))) for i in range(1, 4)]
    platform.foreach_mul_(xs, make(1.0, "float32") / 3)
    for i, x in enumerate(xs, start=1):
        assert tuple(x.shape) == (2**23 + i,)
        equal(platform.sum(platform.cast(x, "float32")) / (2**23 + i), np.float32(1.0))


def test_a_factor_of_another_dtype_scales_without_rounding_to_float32(platform, make, equal, real) -> None:
    xs = [make([1.0, 1.0 + 2.0**-23], real)]
    platform.foreach_mul_(xs, make(0.5, "float32"))
    equal(xs[0], np.array([0.5, 0.5 + 2.0**-24], real))


ORDERS = [0, 1, 2, 3, 0.5, 2.7, -1, np.inf, -np.inf]


@pytest.mark.parametrize("p", ORDERS)
def test_norms_of_a_list_are_those_of_the_flat_arrays(platform, make, near, real, p) -> None:
    random = np.random.default_rng(3)
    arrays = [random.normal(size=shape) for shape in [(), (1,), (5,), (3, 7), (2, 1, 3)]]
    arrays[2][1:3] = 0.0
    found = platform.foreach_norm([make(a, real) for a in arrays], p, real)
    with np.errstate(divide="ignore"):
        near(found, [np.linalg.norm(np.ravel(a), p) for a in arrays])


@pytest.mark.parametrize("p", ORDERS)
def test_norms_of_nothing_change_nothing_beside_others(platform, make, equal, p) -> None:
    empty = [make(np.zeros(shape), "float32") for shape in [(0,), (2, 0)]]
    nothing = np.inf if p < 0 else 0.0
    equal(platform.foreach_norm(empty, p, "float32"), np.array([nothing, nothing], "float32"))
    equal(platform.foreach_norm([empty[0], make(1.0), empty[1]], p, "float32"), [nothing, 1.0, nothing])


@pytest.mark.parametrize("p", [1, 2, 3, np.inf, -np.inf])
def test_norms_tell_of_infinity_and_nan(platform, make, p) -> None:
    xs = [make([1.0, np.inf, 2.0]), make([np.inf, np.nan, 1.0]), make([np.inf, np.inf])]
    found = platform.to_numpy(platform.foreach_norm(xs, p, "float32"))
    assert found[0] == (1.0 if p == -np.inf else np.inf)
    assert np.isnan(found[1])
    assert found[2] == np.inf


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_norms_of_halves_are_computed_in_the_dtype_asked_for(platform, make, equal, dtype) -> None:
    """512 squared, 64 times, is beyond float16; the norm of 1025 ones counts past the 8 bits of bfloat16."""
    xs = [make(np.full((8, 8), 512.0), dtype), make(np.ones(1025), dtype)]
    found = platform.foreach_norm(xs, 2, "float32")
    assert platform.dtype_name(found.dtype) == "float32"
    equal(found, np.array([4096.0, np.sqrt(np.float32(1025))], "float32"))
    equal(platform.foreach_norm(xs, 1, "float32"), np.array([32768.0, 1025.0], "float32"))


def test_norms_are_not_recorded(platform, make, equal) -> None:
    x = platform.set_requires_grad_(make([3.0, 4.0]), True)
    found = platform.foreach_norm([x], 2, "float32")
    assert not platform.requires_grad(found)
    equal(found, [5.0])


def test_foreach_cast_casts_each_and_returns_what_has_the_dtype(platform, make, equal):
    xs = [make([1.0, 2.0]), make([3.0], "float16"), make(np.zeros((0, 2), "float32"))]
    halves = platform.foreach_cast(xs, "float16")
    assert [platform.dtype_name(x.dtype) for x in halves] == ["float16"] * 3
    assert halves[1] is xs[1]
    equal(halves[0], [1.0, 2.0])
    equal(halves[2], np.zeros((0, 2)))


def test_foreach_cast_is_differentiable(platform, make, equal):
    x = platform.set_requires_grad_(make([1.0, 2.0]), True)
    (half,) = platform.foreach_cast([x], "float16")
    platform.backward([platform.sum(half)])
    equal(platform.get_grad(x), [1.0, 1.0])


def test_foreach_split_splits_each_by_its_own_sizes(platform, make, equal):
    xs = [make(NUMBERS, "float32"), make(np.arange(8).reshape(2, 4))]
    first, second = platform.foreach_split(xs, [(1, 2), (0, 4)], dim=1)
    for piece, expected in zip(
        [*first, *second],
        [NUMBERS[:, :1], NUMBERS[:, 1:], np.zeros((2, 0)), np.arange(8).reshape(2, 4)],
        strict=True,
    ):
        equal(piece, expected)


def test_foreach_functions_accept_no_tensors(platform):
    platform.foreach_copy_([], [])
    platform.foreach_add_([], [])
    platform.foreach_mul_([], 2.0)
    assert platform.foreach_cast([], "float32") == []
    assert platform.foreach_split([], []) == []


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


def test_foreach_writes_leave_parameters_trainable(platform, make, equal):
    parameters = [platform.parameter(make([1.0])), platform.parameter(make([2.0, 3.0]))]
    platform.foreach_mul_(parameters, 2.0)
    platform.foreach_add_(parameters, [make([1.0]), make([1.0, 1.0])])
    equal(parameters[1], [5.0, 7.0])
    assert all(platform.is_leaf(p) and platform.requires_grad(p) for p in parameters)


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
