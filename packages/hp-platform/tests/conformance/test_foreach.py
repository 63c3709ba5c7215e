"""TensorOps: many tensors at once."""

from __future__ import annotations

import numpy as np
import pytest

NUMBERS = np.arange(6).reshape(2, 3)


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


@pytest.mark.parametrize("start", [0, 1])
def test_values_are_written_to_two_places_each_in_its_dtype(platform, make, equal, lacks, start) -> None:
    """Beginning in the middle of memory, too, where a device's vectors do not."""
    arrays = [np.arange(5.0) / 3, np.zeros(0), np.arange(6.0).reshape(2, 3)]
    values = [make(a, "float32") for a in arrays]
    if start and not lacks("write_into_view"):
        values[0] = platform.narrow(make(np.append(9.0, arrays[0]), "float32"), 0, 1, 5)
    firsts, seconds = ([make(np.ones_like(a), dtype) for a in arrays] for dtype in ("bfloat16", "float32"))
    counted = None if lacks("version_counter") else [platform.version(x) for x in (firsts[0], seconds[0])]
    platform.foreach_copy_both_(firsts, seconds, values)
    if counted is not None:
        assert all(
            platform.version(x) > before for x, before in zip((firsts[0], seconds[0]), counted, strict=True)
        )
    for first, second, array in zip(firsts, seconds, arrays, strict=True):
        equal(second, array.astype("float32"))
        rounded = platform.cast(platform.cast(make(array, "float32"), "bfloat16"), "float32")
        equal(platform.cast(first, "float32"), platform.to_numpy(rounded))
    platform.foreach_copy_both_([], [], [])
