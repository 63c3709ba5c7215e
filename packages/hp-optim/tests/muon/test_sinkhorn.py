"""The square-root Sinkhorn iteration beside its formula in numpy."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_optim import sinkhorn
from hp_platform import get_platform
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parents[1]))
import muon_oracle

SHAPES = [(1, 1), (1, 5), (5, 1), (3, 7), (7, 3), (13, 13)]


def array(*shape: int) -> np.ndarray:
    return np.random.default_rng([*shape]).normal(size=shape)


def made(x: np.ndarray, dtype: str = "float32", steps: int = 5) -> np.ndarray:
    platform = get_platform()
    result = sinkhorn(steps)(platform.tensor(x, dtype))
    assert platform.dtype_name(result.dtype) == dtype
    return platform.to_numpy(platform.cast(result, "float32") if dtype == "bfloat16" else result)


@distributed(world_size=1)
def test_it_is_its_formula(world: World) -> None:
    exact = world.platform.supports("float64_compute", world.device)
    for steps in (1, 2, 5, 20):
        for rows, cols in SHAPES:
            x = array(4, rows, cols)
            for dtype, tolerance in (("float64", 1e-13), ("float32", 2e-6))[0 if exact else 1 :]:
                given = x.astype(dtype)
                expected = np.stack(
                    [muon_oracle.sinkhorn(matrix, steps) for matrix in given.astype("float64")]
                )
                # Rounding of each step; entries are of size 1.
                np.testing.assert_allclose(
                    made(given, dtype, steps), expected, rtol=0, atol=tolerance * steps
                )


@distributed(world_size=1)
def test_rows_and_columns_come_out_with_equal_lengths_and_entries_with_root_mean_square_1(
    world: World,
) -> None:
    found = made(array(2, 6, 9), steps=30)
    np.testing.assert_allclose(np.sqrt((found**2).sum(1)), 6**0.5, rtol=1e-5)
    np.testing.assert_allclose(np.sqrt((found**2).sum(2)), 9**0.5, rtol=1e-5)
    np.testing.assert_allclose(np.sqrt((made(array(3, 6, 9)) ** 2).mean((1, 2))), 1.0, rtol=1e-5)


@distributed(world_size=1)
def test_16_bits_are_computed_in_32_and_rounded_once(world: World) -> None:
    platform = world.platform
    x = platform.to_numpy(platform.cast(platform.tensor(array(2, 5, 8), "bfloat16"), "float32"))
    rounded = platform.cast(platform.tensor(made(x), "float32"), "bfloat16")
    assert np.array_equal(made(x, "bfloat16"), platform.to_numpy(platform.cast(rounded, "float32")))


@distributed(world_size=1)
def test_zeros_stay_zeros(world: World) -> None:
    x = array(3, 4, 6)
    x[0] = 0.0
    x[1, 2] = 0.0
    x[2, :, 3] = 0.0
    found = made(x)
    assert np.array_equal(found == 0, x == 0)
    assert np.isfinite(found).all()
    # What is left is made as if it were alone: the counts of rows and columns change all lengths by one factor.
    alone = muon_oracle.sinkhorn(np.delete(x[1], 2, 0)) * (4 / 3) ** 0.5
    np.testing.assert_allclose(np.delete(found[1], 2, 0), alone, rtol=0, atol=1e-5)


@distributed(world_size=1)
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_how_large_a_row_is_does_not_matter(world: World, size: float) -> None:
    x = array(1, 4, 6).astype("float32")
    other = x.copy()
    other[0, 1:3] *= np.float32(size)
    # But for the rounding of the product.
    np.testing.assert_allclose(made(other), made(x), rtol=0, atol=5e-6)


@distributed(world_size=1)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_makes_its_matrix_nan_and_no_other(world: World, value: float) -> None:
    x = array(3, 4, 5)
    x[1, 2, 3] = value
    found = made(x)
    assert np.isnan(found[1]).all()
    assert np.array_equal(found[[0, 2]], made(x[[0, 2]]))


@distributed(world_size=1)
def test_its_argument_stays_and_nothing_is_recorded(world: World) -> None:
    platform = world.platform
    given = array(2, 3, 4).astype("float32")
    x = platform.set_requires_grad_(platform.tensor(given, "float32"), True)
    assert not platform.requires_grad(sinkhorn()(x))
    assert np.array_equal(platform.to_numpy(platform.detach(x)), given)


@distributed(world_size=1)
def test_a_stack_may_be_empty(world: World) -> None:
    for shape in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        assert made(np.zeros(shape)).shape == shape


@distributed(world_size=1)
@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((3, 4), "float32", r"a stack of matrices \(b, rows, cols\) .* got shape \(3, 4\) .* reshape one matrix to \(1, rows, cols\)"),
        ((1, 3, 4), "int64", "of floating numbers, got .* int64"),
    ],
)  # fmt: skip
def test_what_is_no_stack_is_refused(world: World, shape: Any, dtype: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sinkhorn()(get_platform().zeros(shape, dtype))


@pytest.mark.once
@pytest.mark.parametrize("steps", [0, -1, 2.0, True, "5", None])
def test_steps_are_a_whole_number(steps: Any) -> None:
    with pytest.raises(ValueError, match="sinkhorn: steps is .*; expected a whole number of at least 1"):
        sinkhorn(steps)


@pytest.mark.once
def test_with_equal_steps_they_are_equal_and_they_can_be_sent_to_other_processes() -> None:
    assert sinkhorn() == sinkhorn(5) != sinkhorn(4)
    again = pickle.loads(pickle.dumps(sinkhorn(3)))
    assert again == sinkhorn(3)
    assert again.__qualname__ == "sinkhorn(steps=3)"
