"""Rules of scale: formulas, names, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hp_optim.muon.scale import SCALE_RULES, scale_rule

pytestmark = pytest.mark.once
SHAPES = [(1, 1), (5, 7), (7, 5), (2048, 8192), (8192, 2048), (13, 13)]


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_each_rule_is_its_formula(rows: int, cols: int) -> None:
    expected = {
        "match_rms_adamw": 0.2 * math.sqrt(max(rows, cols)),
        "original": math.sqrt(max(1, rows / cols)),
        "spectral": math.sqrt(rows / cols),
        "none": 1.0,
    }
    assert set(expected) == set(SCALE_RULES)
    for name, value in expected.items():
        assert scale_rule(name)(rows, cols) == value
    assert scale_rule("match_rms_adamw", 0.5)(rows, cols) == pytest.approx(0.5 * math.sqrt(max(rows, cols)))
    assert scale_rule("none", 0.5)(rows, cols) == 1.0


@pytest.mark.parametrize(("rows", "cols"), SHAPES[:3])
def test_the_default_gives_orthogonal_matrices_the_root_mean_square_of_adamw(rows: int, cols: int) -> None:
    u, _, v = np.linalg.svd(np.random.default_rng(0).normal(size=(rows, cols)), full_matrices=False)
    update = scale_rule("match_rms_adamw")(rows, cols) * (u @ v)
    assert np.sqrt((update**2).mean()) == pytest.approx(0.2)


def test_a_function_is_a_rule() -> None:
    assert scale_rule(lambda rows, cols: rows + cols)(3, 4) == 7


def test_without_columns_nothing_is_divided() -> None:
    assert [scale_rule(name)(3, 0) for name in ("original", "spectral")] == [1.0, 1.0]


def test_what_is_no_rule_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="scale is 'rms'; expected 'match_rms_adamw', 'original', 'spectral', 'none', or a function",
    ):
        scale_rule("rms")
    for rms in (-0.1, math.nan, math.inf, "0.2", None, True):
        with pytest.raises(ValueError, match="matched_adamw_rms is .*; expected a number of at least 0"):
            scale_rule("match_rms_adamw", rms)  # type: ignore[arg-type]
