"""The sets of coefficients: what they do to singular values, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from hp_optim.muon import coefficients
from hp_optim.muon.coefficients import COEFFICIENT_SETS, Coefficients, coefficients_of

pytestmark = pytest.mark.once


def values_after(found: Coefficients, num_steps: int, smallest: float) -> np.ndarray:
    """What becomes of singular values between the smallest and 1."""
    s = np.geomspace(smallest, 1.0, 200_001) / found.margin
    for a, b, c in found.of_steps(num_steps):
        s = a * s + b * s**3 + c * s**5
    return s


def table() -> dict[tuple[str, int], tuple[float, float]]:
    """The intervals of the module's docstring, by set and number of steps."""
    lines = [line.split("  ") for line in (coefficients.__doc__ or "").splitlines()]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    (names,) = [row[1:] for row in rows if row[:1] == ["steps"]]
    found = {}
    for steps, *cells in [row for row in rows if len(row) > 1 and row[0].isdigit()]:
        for name, cell in zip(names, cells, strict=True):
            if " ... " in cell:
                low, high = map(float, cell.split(" ... "))
            else:
                middle, apart = cell.split(" to ")
                apart = {"rounding": "1e-12"}.get(apart, apart)
                low, high = float(middle) - float(apart), float(middle) + float(apart)
            found[name, int(steps)] = (low, high)
    return found


def test_the_documented_intervals_hold_and_are_tight() -> None:
    intervals = table()
    assert len(intervals) == 18
    for (name, steps), (low, high) in intervals.items():
        s = values_after(COEFFICIENT_SETS[name], steps, 0.01)
        assert low <= s.min() and s.max() <= high, (name, steps, s.min(), s.max())
        assert high - s.max() <= 2e-3 and s.min() - low <= 2e-3, (name, steps, s.min(), s.max())


def test_small_values_grow_by_the_product_of_the_first_coefficients() -> None:
    for name in ("asym5", "quintic"):
        grown = values_after(COEFFICIENT_SETS[name], 5, 1e-6)[0] / 1e-6
        assert 480 < grown < 500, (name, grown)


def test_fewer_steps_take_the_first_triples_and_more_repeat_the_last() -> None:
    for found in COEFFICIENT_SETS.values():
        length = len(found.triples)
        assert found.of_steps(length) == found.triples
        assert found.of_steps(1) == found.triples[:1]
        assert found.of_steps(length + 3) == found.triples + found.triples[-1:] * 3
    assert len(COEFFICIENT_SETS["asym5"].triples) == 5
    assert COEFFICIENT_SETS["asym5"].of_steps(9)[5:] == ((2.8366, -3.0525, 1.2012),) * 4


def test_more_steps_than_five_are_made_and_draw_values_together() -> None:
    spread = [np.ptp(values_after(COEFFICIENT_SETS["asym5"], steps, 0.01)) for steps in (5, 6, 8, 12)]
    assert spread == sorted(spread, reverse=True)
    assert spread[-1] < spread[0] / 100


def test_polar_express_carries_the_safety_factor_of_its_paper() -> None:
    found = COEFFICIENT_SETS["polar-express"]
    assert found.margin == 1.01
    np.testing.assert_allclose(
        found.triples[0],
        (8.28721201814563 / 1.01, -23.595886519098837 / 1.01**3, 17.300387312530933 / 1.01**5),
    )
    assert found.triples[-1] == (1.875, -1.25, 0.375)


def test_own_triples_are_taken_as_a_sequence_or_as_one() -> None:
    one = (1.5, -0.5, 0)
    assert coefficients_of(one).triples == ((1.5, -0.5, 0.0),)
    assert coefficients_of([list(one), (2, -1, 0)]).triples == ((1.5, -0.5, 0.0), (2.0, -1.0, 0.0))
    assert coefficients_of([one]).of_steps(3) == ((1.5, -0.5, 0.0),) * 3
    assert coefficients_of(np.array([one])).triples == ((1.5, -0.5, 0.0),)
    given = Coefficients("mine", (one,))
    assert coefficients_of(given) is given
    assert coefficients_of("asym5") is COEFFICIENT_SETS["asym5"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "asym6",
            "ns_coefficients is 'asym6'; expected 'asym5', 'quintic', 'polar-express', or a sequence of triples",
        ),
        ([], r"ns_coefficients is \[\]; expected triples of finite numbers"),
        ([(1.0, 2.0)], "expected triples of finite numbers, such as"),
        ((1.0, 2.0), "one for each step"),
        ([(1.0, 2.0, float("nan"))], "expected triples of finite numbers"),
        ([(1.0, 2.0, "3")], "expected triples of finite numbers"),
        (5, "ns_coefficients is 5; expected triples"),
        (None, "ns_coefficients is None; expected triples"),
        ([1.0, (1.0, 2.0, 3.0)], "expected triples of finite numbers"),
    ],
)
def test_what_are_no_triples_is_refused(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        coefficients_of(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, None])
def test_a_number_of_steps_is_a_whole_one(steps: object) -> None:
    with pytest.raises(ValueError, match="a whole number of at least 1 is expected"):
        COEFFICIENT_SETS["asym5"].of_steps(steps)  # type: ignore[arg-type]
