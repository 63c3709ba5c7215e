"""What a schedule is asked to be, checked once, and the multiplier that follows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Integral, Real
from typing import Any

from hp_optim.schedule import formulas

STYLES = ("constant", "linear", "cosine", "WSD")


@dataclass(frozen=True)
class ScheduleConfig:
    """The arguments of :func:`hp_optim.get_hyper_lr_scheduler`, which says what they mean. ValueError for what does not fit."""

    total_steps: int
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    decay_style: str = "cosine"
    lr: float = 1e-4
    lr_min: float = 1e-7
    lr_start: float = 0.0
    lr_decay_ratio: float = 1.0
    wsd_decay_steps: int | None = None
    lr_wsd_decay_style: str = "exponential"

    def __post_init__(self) -> None:
        style = next((s for s in STYLES if s.lower() == str(self.decay_style).lower()), None)
        if style is None:
            raise ValueError(f"decay_style is {self.decay_style!r}; it is one of {_shown(STYLES)}")
        if self.lr_wsd_decay_style not in formulas.SHAPES:
            raise ValueError(
                f"lr_wsd_decay_style is {self.lr_wsd_decay_style!r}; it is one of {_shown(formulas.SHAPES)}"
            )
        # Numbers of numpy become Python's, so that the state is plain and equal after a checkpoint.
        object.__setattr__(self, "decay_style", style)
        for name in ("total_steps", "warmup_steps"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        for name in ("warmup_ratio", "lr", "lr_min", "lr_start", "lr_decay_ratio"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        if self.total_steps <= 0:
            raise ValueError(
                f"total_steps is {self.total_steps}; a schedule has at least 1 step: give the number of optimizer steps of the training"
            )
        self._check_rates()
        for name in ("warmup_ratio", "lr_decay_ratio"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it is a part of total_steps, 0 or more: 0.1 is a tenth"
                )
        if self.num_warmup >= self.total_steps:
            raise ValueError(
                f"the warm-up of {self.num_warmup} steps (warmup_steps={self.warmup_steps}, warmup_ratio={self.warmup_ratio}) takes all of "
                f"total_steps={self.total_steps}: give fewer, or a longer training"
            )
        if style == "WSD":
            self._check_window()

    def _check_rates(self) -> None:
        if self.lr_min < 0:
            raise ValueError(f"lr_min is {self.lr_min}; a learning rate is not negative: give 0 or more")
        if self.lr <= 0:
            raise ValueError(f"lr is {self.lr}; the peak of the schedule is above 0: give the learning rate")
        if self.lr < self.lr_min:
            raise ValueError(
                f"lr is {self.lr}, below lr_min, which is {self.lr_min}: the schedule falls from lr to lr_min, so exchange them"
            )

    def _check_window(self) -> None:
        if self.wsd_decay_steps is None:
            raise ValueError(
                "decay_style='WSD' needs wsd_decay_steps: give the number of steps of the decay at the end"
            )
        num_decay = _whole("wsd_decay_steps", self.wsd_decay_steps)
        object.__setattr__(self, "wsd_decay_steps", num_decay)
        if not 0 < num_decay <= self.total_steps:
            raise ValueError(
                f"wsd_decay_steps is {num_decay}; the decay is a part of the training, 1 to total_steps={self.total_steps} steps"
            )

    @property
    def num_warmup(self) -> int:
        """Steps of warm-up: ``warmup_steps``, or of the ratio if that is not above 0."""
        return self.warmup_steps if self.warmup_steps > 0 else int(self.total_steps * self.warmup_ratio)

    def multiplier(self, step: int) -> float:
        """By what a group's initial learning rate is multiplied at ``step``, 0 or more."""
        return max(0.0, self._multiplier(step))

    def _multiplier(self, step: int) -> float:
        begin, floor = self.num_warmup, self.lr_min / self.lr
        if step < begin:
            return formulas.warmup(step, begin, self.lr_start, self.lr)
        if self.decay_style == "constant":
            return 1.0
        if self.decay_style == "WSD":
            assert self.wsd_decay_steps is not None
            return formulas.warmup_stable_decay(
                step, self.total_steps, self.wsd_decay_steps, self.lr_wsd_decay_style, floor
            )
        end = int(self.total_steps * self.lr_decay_ratio)
        decay = formulas.linear if self.decay_style == "linear" else formulas.cosine
        return decay(step, begin, end, floor)

    def state(self) -> dict[str, Any]:
        """As plain numbers and texts, for a checkpoint."""
        return asdict(self)

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """What is another value in a saved state, for a message."""
        return [
            f"{field.name}={saved[field.name]!r} (now {getattr(self, field.name)!r})"
            for field in fields(self)
            if field.name in saved and saved[field.name] != getattr(self, field.name)
        ]


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} is {value!r}; it is a whole number of optimizer steps: give an int")
    return int(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it is a finite number: give a float")
    return float(value)


def _shown(names: Any) -> str:
    return ", ".join(map(repr, names))
