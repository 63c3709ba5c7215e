"""Schedules against tables that other code computes from the formulas, at every step and at all corners."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hp_optim import get_hyper_lr_scheduler


class Fake:
    """What a schedule needs of an optimizer."""

    def __init__(self, *rates: Any) -> None:
        self.param_groups = [{"lr": rate} for rate in rates or (1.0,)]


def multipliers(num_steps: int, **options: Any) -> np.ndarray:
    """Of steps 0 to ``num_steps - 1``."""
    optimizer = Fake(1.0)
    schedulers = get_hyper_lr_scheduler(optimizer, **options)
    found = []
    for _ in range(num_steps):
        found.append(optimizer.param_groups[0]["lr"])
        assert schedulers.get_last_lr() == found[-1:]
        schedulers.step()
    return np.array(found)


def table(
    num_steps: int,
    total_steps: int,
    warmup_steps: int = 0,
    warmup_ratio: float = 0.0,
    decay_style: str = "cosine",
    lr: float = 1e-4,
    lr_min: float = 1e-7,
    lr_start: float = 0.0,
    lr_decay_ratio: float = 1.0,
    wsd_decay_steps: int = 1,
    lr_wsd_decay_style: str = "exponential",
) -> np.ndarray:
    """The same of whole arrays, in pieces that are put together: other code than the library's."""
    s = np.arange(num_steps, dtype=np.float64)
    warm = warmup_steps if warmup_steps > 0 else int(total_steps * warmup_ratio)
    m = lr_min / lr
    if decay_style == "constant":
        after = np.ones(num_steps)
    elif decay_style == "WSD":
        first = total_steps - wsd_decay_steps
        x = np.clip((s - first) / wsd_decay_steps, 0.0, 1.0)
        c = {
            "linear": 1.0 - x,
            "cosine": np.cos(x * np.pi / 2) ** 2,
            "exponential": np.exp2(1.0 - x) - 1.0,
            "minus_sqrt": 1.0 - x**0.5,
        }[lr_wsd_decay_style]
        after = np.where(s < first, 1.0, c + m - c * m)
    else:
        last = int(total_steps * lr_decay_ratio)
        r = np.interp(s, [warm, last], [0.0, 1.0]) if last > warm else np.ones(num_steps)
        after = np.fmax(1.0 - r, m) if decay_style == "linear" else m + (1.0 - m) * np.cos(r * np.pi / 2) ** 2
    if warm == 0:
        return np.fmax(after, 0.0)
    ramp = np.interp(s, [0.0, warm], [lr_start / lr, 1.0])
    return np.fmax(np.where(s < warm, ramp, after), 0.0)


STYLES = [
    {"decay_style": "constant"},
    {"decay_style": "linear"},
    {"decay_style": "cosine"},
    *(
        {"decay_style": "WSD", "wsd_decay_steps": steps, "lr_wsd_decay_style": style}
        for steps, style in itertools.product((1, 7, 20), ("linear", "cosine", "exponential", "minus_sqrt"))
    ),
]
WARMUPS = [
    {},
    {"warmup_steps": 1},
    {"warmup_steps": 5},
    {"warmup_steps": 19},
    {"warmup_ratio": 0.26},
    {"warmup_steps": -3, "warmup_ratio": 0.04},
]
RATES = [
    {"lr": 1.0, "lr_min": 0.1},
    {"lr": 3e-4, "lr_min": 0.0, "lr_start": 1e-5},
    {"lr": 0.5, "lr_min": 0.5, "lr_start": 0.7},
    {"lr": 1.0, "lr_min": 0.0, "lr_start": -2.0},
]
ENDS = [{}, {"lr_decay_ratio": 0.5}, {"lr_decay_ratio": 1.3}, {"lr_decay_ratio": 0.0}]


@pytest.mark.parametrize("style", STYLES, ids=lambda s: "-".join(map(str, s.values())))
def test_every_step_is_that_of_the_table(style: dict[str, Any]) -> None:
    """27 steps of 20: the training goes on after its end. Rounding: some operations on numbers of at most 1."""
    for warmup, rates, end in itertools.product(WARMUPS, RATES, ENDS):
        options = {"total_steps": 20, **style, **warmup, **rates, **end}
        np.testing.assert_allclose(
            multipliers(27, **options), table(27, **options), rtol=0, atol=1e-14, err_msg=str(options)
        )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"decay_style": "constant", "warmup_steps": 2, "lr_start": 0.2}, [0.2, 0.6, 1, 1, 1, 1, 1]),
        # Not stretched to the floor: it falls as if to 0, and stops at the floor.
        ({"decay_style": "linear", "lr_min": 0.3}, [1, 0.75, 0.5, 0.3, 0.3, 0.3, 0.3]),
        ({"decay_style": "linear", "warmup_steps": 2}, [0, 0.5, 1, 0.5, 0.1, 0.1, 0.1]),
        ({"decay_style": "cosine", "lr_min": 0.5}, [1, 0.5 + 0.25 * (1 + 0.5**0.5), 0.75, 0.75 - 0.125 * 2**0.5, 0.5, 0.5, 0.5]),
        ({"decay_style": "cosine", "lr_decay_ratio": 0.5}, [1, 0.55, 0.1, 0.1, 0.1, 0.1, 0.1]),
        ({"decay_style": "WSD", "wsd_decay_steps": 2, "lr_wsd_decay_style": "linear"}, [1, 1, 1, 0.55, 0.1, 0.1, 0.1]),
        ({"decay_style": "WSD", "wsd_decay_steps": 4, "lr_wsd_decay_style": "minus_sqrt", "lr_min": 0},
         [1, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0, 0, 0]),
        ({"decay_style": "wsd", "wsd_decay_steps": 2, "lr_min": 0}, [1, 1, 1, 2**0.5 - 1, 0, 0, 0]),
        # The warm-up reaches into the decay, and goes first.
        ({"decay_style": "WSD", "wsd_decay_steps": 4, "lr_wsd_decay_style": "linear", "warmup_steps": 2, "lr_min": 0}, [0, 0.5, 0.5, 0.25, 0, 0, 0]),
        ({"decay_style": "WSD", "wsd_decay_steps": 2, "lr_wsd_decay_style": "cosine", "lr_min": 0, "lr_decay_ratio": 0.25}, [1, 1, 1, 0.5, 0, 0, 0]),
    ],
)  # fmt: skip
def test_steps_worked_out_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    """Four steps, and three after the end."""
    found = multipliers(7, total_steps=4, **{"lr": 1.0, "lr_min": 0.1, **options})
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-15)


def test_the_ends_are_met_exactly() -> None:
    """No rounding where a rate is given by the caller: at the start, at the peak, at the end."""
    for style in ("linear", "cosine"):
        found = multipliers(102, total_steps=100, warmup_steps=10, decay_style=style, lr=0.3, lr_min=0.03)
        assert found[0] == 0.0
        assert found[10] == 1.0
        assert found[100] == found[101] == 0.03 / 0.3


def test_groups_keep_the_proportion_of_their_rates() -> None:
    optimizer = Fake(0.5, 2.0)
    schedulers = get_hyper_lr_scheduler(optimizer, 4, decay_style="linear", lr=7.0, lr_min=0.0)
    assert schedulers.get_last_lr() == [0.5, 2.0]
    schedulers.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.375, 1.5]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.5, 2.0]


def test_the_first_rate_is_set_when_the_schedule_is_made() -> None:
    optimizer = Fake(2.0)
    get_hyper_lr_scheduler(optimizer, 10, warmup_steps=4, lr=1.0, lr_start=0.25, lr_min=0.0)
    assert optimizer.param_groups[0]["lr"] == 0.5
