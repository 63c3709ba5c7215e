"""Newton-Schulz of batches: equal to the oracle, singular values where the sets say, odd sizes, batches, refusals."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hp_optim.muon.coefficients import COEFFICIENT_SETS
from hp_optim.muon.newton_schulz import (
    batches,
    compute_dtype,
    newton_schulz,
    orthogonalize,
    orthogonalized_batches,
    working_bytes,
)
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parents[1]))
import muon_oracle

SHAPES = [(1, 1), (1, 7), (7, 1), (5, 5), (5, 7), (7, 5), (13, 64), (64, 13), (31, 37)]
# By the dtype of the iteration, how far a singular value of about 1 may lie off: an iterate is rounded in each of five steps, and
# what is off in one is multiplied by up to 4 in the next, whose rounding comes on top.
OFF = {"float64": 1e-12, "float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}


def most_exact(world: World) -> str:
    return "float64" if world.platform.supports("float64_compute", world.device) else "float32"


def made(world: World, array: np.ndarray, dtype: str) -> Any:
    return world.platform.tensor(array, dtype, world.device)


def well_conditioned(shape: tuple[int, int], seed: int = 0, smallest: float = 0.02) -> np.ndarray:
    """A matrix whose singular values are spread between the smallest and 1 of its norm, and no smaller."""
    random = np.random.default_rng(seed)
    u, _, v = np.linalg.svd(random.normal(size=shape), full_matrices=False)
    s = np.geomspace(1.0, max(smallest * 3, 0.1), min(shape))
    s = s / np.linalg.norm(s)
    assert s.min() >= smallest or min(shape) > 30
    return np.asarray(7.3 * (u * np.maximum(s, smallest)) @ v)


def near(actual: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=OFF[dtype])


@distributed(world_size=1)
def test_matrices_become_what_the_oracle_says(world: World) -> None:
    platform, dtype = world.platform, most_exact(world)
    for name, found in COEFFICIENT_SETS.items():
        for shape in SHAPES:
            array = np.stack([well_conditioned(shape, seed) for seed in range(3)])
            for steps in (1, 3, 5, 9):
                x = made(world, array, dtype)
                result = newton_schulz(x, coefficients=name, steps=steps, dtype=dtype)
                assert platform.dtype_name(result.dtype) == dtype
                expected = [
                    muon_oracle.newton_schulz(matrix, found.triples, steps, found.margin) for matrix in array
                ]
                near(platform.to_numpy(result), np.stack(expected), dtype)
                np.testing.assert_array_equal(platform.to_numpy(x), array.astype(dtype))


@distributed(world_size=1)
def test_singular_values_come_to_lie_in_the_documented_interval(world: World) -> None:
    intervals = {"asym5": (0.977, 1.032), "quintic": (0.681, 1.135), "polar-express": (0.870, 1.124)}
    assert set(intervals) == set(COEFFICIENT_SETS)
    for name, (low, high) in intervals.items():
        for dtype in ("float64", "float32", "float16", "bfloat16"):
            if not computes(world, dtype):
                continue
            for shape in SHAPES:
                x = made(world, well_conditioned(shape)[None], most_exact(world))
                (result,) = world.platform.to_numpy(newton_schulz(x, coefficients=name, dtype=dtype))
                s = np.linalg.svd(result.astype("float64"), compute_uv=False)
                assert low - OFF[dtype] <= s.min() and s.max() <= high + OFF[dtype], (name, dtype, shape, s)


def computes(world: World, dtype: str) -> bool:
    capability = {"float64": "float64_compute", "bfloat16": "bfloat16_compute"}.get(dtype)
    return capability is None or world.platform.supports(capability, world.device)


@distributed(world_size=1)
def test_rows_and_columns_keep_their_directions(world: World) -> None:
    dtype = most_exact(world)
    for shape in SHAPES:
        array = well_conditioned(shape)
        u, _, v = np.linalg.svd(array, full_matrices=False)
        x = made(world, array[None], dtype)
        (result,) = world.platform.to_numpy(
            newton_schulz(x, coefficients="polar-express", steps=12, dtype=dtype)
        )
        near(result, u @ v, dtype)
        turned = newton_schulz(
            world.platform.transpose(x, 1, 2), coefficients="polar-express", steps=12, dtype=dtype
        )
        near(world.platform.to_numpy(turned)[0], (u @ v).T, dtype)


@distributed(world_size=1)
def test_any_shape_equals_the_oracle(world: World) -> None:
    dtype = most_exact(world)
    sizes = st.integers(0, 12)

    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 3), sizes, sizes, st.integers(1, 7), st.floats(-12, 12))
    def check(count: int, rows: int, cols: int, steps: int, exponent: float) -> None:
        # With much smaller numbers the 1e-7 beside the norm would matter; the oracle has it too.
        array = np.random.default_rng(rows).normal(size=(count, rows, cols)).astype(dtype) * 10.0**exponent
        result = world.platform.to_numpy(newton_schulz(made(world, array, dtype), steps=steps, dtype=dtype))
        given_as = array.astype(dtype).astype("float64")
        expected = (
            [muon_oracle.newton_schulz(matrix, steps=steps) for matrix in given_as] if array.size else array
        )
        near(result, np.asarray(expected).reshape(array.shape), dtype)

    check()


@distributed(world_size=1)
def test_the_size_of_a_matrix_does_not_matter(world: World) -> None:
    platform = world.platform
    array = well_conditioned((5, 7))[None]
    for dtype in ("float32", "float16", "bfloat16"):
        if not computes(world, dtype):
            continue
        expected = platform.to_numpy(newton_schulz(made(world, array, "float32"), dtype=dtype))
        # Factors are powers of two, so nothing is rounded otherwise; 2**-30 and 2**50 are beyond what float16 holds.
        for exponent in (50, 20, -10, -20, -30):
            x = made(world, array * 2.0**exponent, "float32")
            result = platform.to_numpy(newton_schulz(x, dtype=dtype))
            # The norm, 7.3 times the factor, has 1e-7 beside it: at 2**-20 a part of 1.4e-2.
            if exponent >= -10:
                near(result, expected, dtype)
            assert 0 < np.abs(result).max() < 1.2, (dtype, exponent)


@distributed(world_size=1)
def test_zeros_stay_zeros_and_what_is_not_finite_spoils_only_its_own_matrix(world: World) -> None:
    platform = world.platform
    array = np.stack([well_conditioned((5, 7), seed) for seed in range(5)])
    array[1] = 0.0
    array[2, 3, 4] = np.nan
    array[3, 0, 0] = np.inf
    for dtype in filter(lambda dtype: computes(world, dtype), ("float64", "float32", "bfloat16")):
        result = platform.to_numpy(newton_schulz(made(world, array, most_exact(world)), dtype=dtype))
        assert (result[1] == 0).all()
        assert np.isnan(result[2]).all() and np.isnan(result[3]).all()
        near(result[[0, 4]], np.stack([muon_oracle.newton_schulz(array[k]) for k in (0, 4)]), dtype)


@distributed(world_size=1)
def test_what_holds_nothing_stays_so(world: World) -> None:
    platform = world.platform
    for shape in [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0), (3, 0, 0)]:
        result = newton_schulz(platform.zeros(shape, "float32", world.device), dtype="float32")
        assert tuple(result.shape) == shape
        assert platform.device_of(result).startswith(world.device.partition(":")[0])
    assert orthogonalize([]) == []
    nothing, one = orthogonalize(
        [platform.zeros((0, 4), "float32", world.device), made(world, np.array([[-3.0]]), "float32")],
        dtype="float32",
    )
    assert tuple(nothing.shape) == (0, 4)
    near(platform.to_numpy(one), muon_oracle.newton_schulz(np.array([[-3.0]])), "float32")


@distributed(world_size=1)
def test_the_dtype_is_bfloat16_where_the_device_computes_it(world: World) -> None:
    platform = world.platform
    expected = "bfloat16" if platform.supports("bfloat16_compute", world.device) else "float32"
    for given_as in ("float32", "float16", "bfloat16"):
        x = platform.cast(made(world, np.ones((1, 2, 3)), "float32"), given_as)
        if computes(world, given_as):
            assert platform.dtype_name(newton_schulz(x).dtype) == expected
        assert platform.dtype_name(compute_dtype(platform, x)) == expected
    assert platform.dtype_name(compute_dtype(platform, x, "float16")) == "float16"


@distributed(world_size=1)
def test_nothing_is_recorded(world: World) -> None:
    platform = world.platform
    x = platform.set_requires_grad_(made(world, np.ones((1, 2, 3)), "float32"), True)
    assert not platform.requires_grad(newton_schulz(x, dtype="float32"))


@distributed(world_size=1)
def test_results_do_not_depend_on_the_batches(world: World) -> None:
    platform, dtype = world.platform, most_exact(world)
    shapes = [(5, 7), (31, 37), (5, 7), (7, 5), (1, 1), (31, 37), (5, 7), (5, 7), (0, 3), (31, 37)]
    arrays = [
        well_conditioned(shape, seed) if 0 not in shape else np.zeros(shape)
        for seed, shape in enumerate(shapes)
    ]
    matrices = [made(world, array, dtype) for array in arrays]
    found = {}
    for cap in (1, 2**12, 2**29):
        results = orthogonalize(matrices, dtype=dtype, memory_cap=cap)
        found[cap] = [platform.to_numpy(result) for result in results]
        for result, array in zip(found[cap], arrays, strict=True):
            assert result.shape == array.shape
            near(result, muon_oracle.newton_schulz(array) if array.size else array, dtype)
        # The same batches again: the same bits.
        again = [platform.to_numpy(result) for result in orthogonalize(matrices, dtype=dtype, memory_cap=cap)]
        assert all(np.array_equal(a, b) for a, b in zip(found[cap], again, strict=True))


@distributed(world_size=1)
def test_the_others_of_a_batch_change_no_bit(world: World) -> None:
    platform = world.platform
    arrays = np.stack([well_conditioned((13, 9), seed) for seed in range(6)])
    whole = platform.to_numpy(newton_schulz(made(world, arrays, "float32"), dtype="float32"))
    others = arrays.copy()
    others[[0, 2, 3, 5]] = [np.nan * arrays[0], 0 * arrays[0], 1e6 * arrays[1], arrays[4]]
    changed = platform.to_numpy(newton_schulz(made(world, others, "float32"), dtype="float32"))
    np.testing.assert_array_equal(changed[[1, 4]], whole[[1, 4]])


@pytest.mark.once
def test_batches_hold_equal_shapes_below_the_cap() -> None:
    shapes = [(4, 8), (8, 4), (4, 8), (4, 8), (2, 2), (4, 8), (8, 4)]
    each = working_bytes((4, 8), 4, 2)
    assert each == 4 * 8 * (4 + 4 + 4) + 2 * 16 * 2 == working_bytes((8, 4), 4, 2)
    assert batches(shapes, 4, 2) == [[0, 2, 3, 5], [1, 6], [4]]
    assert batches(shapes, 4, 2, 3 * each) == [[0, 2, 3], [5], [1, 6], [4]]
    assert batches(shapes, 4, 2, 2 * each - 1) == [[0], [2], [3], [5], [1], [6], [4]]
    assert batches(shapes, 4, 2, 1) == batches(shapes, 4, 2, each)
    assert batches([(0, 4)] * 3, 4, 2, 1) == [[0], [1], [2]]
    assert batches([], 4, 2) == []
    with pytest.raises(
        ValueError, match="memory_cap is 0; expected bytes, at least 1, as the usual 1073741824"
    ):
        batches(shapes, 4, 2, 0)


@distributed(world_size=1)
def test_batches_come_one_at_a_time(world: World) -> None:
    matrices = [made(world, well_conditioned(shape), "float32") for shape in ((3, 4), (4, 3), (3, 4))]
    places = [places for places, _ in orthogonalized_batches(matrices, dtype="float32")]
    assert places == [[0, 2], [1]]


@distributed(world_size=1)
def test_what_are_no_batches_of_matrices_is_refused(world: World) -> None:
    platform = world.platform
    refused: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: newton_schulz(platform.zeros((3, 4))),
            "a batch of matrices (b, m, n), got a tensor of shape (3, 4): reshape",
        ),
        (
            lambda: newton_schulz(platform.zeros((2, 3, 4), "int64")),
            "takes floating numbers, got a tensor of int64",
        ),
        (
            lambda: newton_schulz(platform.zeros((2, 3, 4)), dtype="int32"),
            "ns_dtype is int32; expected a floating one",
        ),
        (
            lambda: newton_schulz(platform.zeros((2, 3, 4)), steps=0),
            "ns_steps is 0; a whole number of at least 1",
        ),
        (lambda: newton_schulz(platform.zeros((2, 3, 4)), coefficients="none"), "ns_coefficients is 'none'"),
        (
            lambda: orthogonalize([platform.zeros((4,))]),
            "orthogonalize takes matrices (m, n), got a tensor of shape (4,)",
        ),
        (lambda: orthogonalize([platform.zeros((4, 4))], memory_cap=-1), "memory_cap is -1; expected bytes"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
