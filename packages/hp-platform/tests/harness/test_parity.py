"""assert_parity and count_collectives: what they accept, and what they say."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hp_platform.testing import assert_parity

pytestmark = pytest.mark.once

A = np.array([[1.0, 2.0], [3.0, 4.0]])


class Sharded:
    def __init__(self, full: np.ndarray) -> None:
        self._full = full

    def full_tensor(self) -> np.ndarray:
        return self._full


def test_equal_values_pass() -> None:
    assert_parity(A, A.copy(), exact=True)
    assert_parity(A + 1e-9, A, rtol=0, atol=1e-8)
    assert_parity(A * (1 + 1e-9), A, rtol=1e-8)
    assert_parity({"w": [A, (1.5, None)], "n": 3}, {"n": 3, "w": (A, [1.5, None])}, exact=True)
    assert_parity(Sharded(A), A, exact=True)
    assert_parity(np.zeros((0, 3)), np.zeros((0, 3)), exact=True)
    assert_parity(np.array([np.inf, 1]), np.array([np.inf, 1]), rtol=1e-3)
    assert_parity(np.array(2.0), np.array(2.0), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("actual", "expected", "how", "message"),
    [
        (
            A + np.array([[0, 0], [0.5, 0.25]]),
            A,
            {"rtol": 1e-3, "atol": 1e-4, "name": "grad"},
            "grad: not equal within rtol=0.001, atol=0.0001; 2 of 4 elements differ; largest difference 0.5 at (1, 0) "
            "(actual 3.5, expected 3.0), largest relative difference 0.166667; actual float64[2, 2], expected float64[2, 2]",
        ),
        (A, A[:1], {"exact": True}, "value: shapes differ: actual float64[2, 2], expected float64[1, 2]"),
        (
            A,
            A.astype(np.float32),
            {"rtol": 1},
            "value: dtypes differ: actual float64[2, 2], expected float32[2, 2]",
        ),
        (
            np.array([1, np.nan]),
            np.array([1, np.nan]),
            {"rtol": 1},
            "actual is NaN in 1 of 2 elements, first at (1,)",
        ),
        (
            A,
            np.array([[1, 2], [np.nan, 4]]),
            {"exact": True},
            "expected is NaN in 1 of 4 elements, first at (1, 0)",
        ),
        (
            np.array([0.0]),
            np.array([-0.0]),
            {"exact": True},
            "value: not equal bit by bit; 1 of 1 elements differ",
        ),
        (
            np.array([1.0]),
            np.array([np.inf]),
            {"rtol": 1},
            "1 of 1 elements differ; largest difference inf at (0,)",
        ),
        (
            np.array([1, 2]),
            np.array([1, 3]),
            {"rtol": 1, "atol": 5},
            "value: not equal exactly; 1 of 2 elements differ",
        ),
        (
            {"a": [A, A + 1]},
            {"a": [A, A]},
            {"exact": True, "name": "state"},
            "state['a'][1]: not equal bit by bit",
        ),
        ({"a": 1}, {"b": 1}, {"exact": True}, "keys differ; only in actual: 'a'; only in expected: 'b'"),
        ([1], [1, 2], {"exact": True}, "value: actual has 1 entries, expected has 2"),
        (None, A, {"exact": True}, "value: actual is None, expected is a ndarray"),
    ],
)
def test_differences_are_told(actual, expected, how, message) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        assert_parity(actual, expected, **how)


def test_tolerances_must_be_argued() -> None:
    with pytest.raises(ValueError, match="has no default tolerance: give rtol and atol, or exact=True"):
        assert_parity(A, A)
    with pytest.raises(ValueError, match="exact=True takes no tolerances"):
        assert_parity(A, A, exact=True, rtol=1e-3)
