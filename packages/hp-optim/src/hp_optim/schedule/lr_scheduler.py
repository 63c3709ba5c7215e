"""The schedule of one optimizer: sets the learning rates of its groups, step by step."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Final

from hp_optim.schedule.config import ScheduleConfig
from hp_platform.platform import get_platform

INITIAL: Final = "initial_lr"
"""Key of a group, as torch's schedulers call it."""


class LRScheduler:
    """Sets ``group["lr"]`` of every group to the group's initial rate times the multiplier of the step.

    With the surface of ``torch.optim.lr_scheduler.LambdaLR``, for any object with ``param_groups``. Made by
    :func:`hp_optim.get_hyper_lr_scheduler`.

    Args:
        optimizer: whose groups are set, at once to the rates of step 0. A rate that is a tensor is written in place, so that
            captured and compiled steps see it.
        config: the schedule.
        override: whether :meth:`load_state_dict` says nothing where the saved schedule was another one.

    Attributes:
        optimizer: the same.
        base_lrs: the initial rate of every group, a number: ``group["initial_lr"]``, which is the group's rate when the
            scheduler first sees it. Groups that are added later are scheduled from the next step on.
        last_epoch: the present step, from 0.

    ValueError for an object without groups.
    """

    def __init__(self, optimizer: Any, config: ScheduleConfig, *, override: bool = False) -> None:
        groups_of(optimizer)
        self.optimizer = optimizer
        self.config = config
        self.override = override
        self.base_lrs: list[float] = []
        self.last_epoch = 0
        self._step_count = 1
        self._last_lr: list[float] = []
        self._watch = _Watch(optimizer)
        self._set_rates()

    def step(self) -> None:
        """Go on to the next step. To be called after ``optimizer.step()``.

        UserWarning if the optimizer has hooks on its steps (as on torch) and made none before the first call: the rate of
        step 0 would never be used.
        """
        if self._step_count == 1 and not self._watch.has_stepped:
            warnings.warn(
                "the schedule was stepped before the optimizer, so the learning rate of step 0 is never used: call optimizer.step() first "
                "(a GradScaler that skips the first step for infinities has this effect, too)",
                stacklevel=3,
            )
        self._step_count = self._step_count + 1
        self.last_epoch = self.last_epoch + 1
        self._set_rates()

    def get_last_lr(self) -> list[float]:
        """The present rate of every group, as numbers."""
        return list(self._last_lr)

    def get_lr(self) -> list[float]:
        """What the present step's rates are by the formula."""
        factor = self.config.multiplier(self.last_epoch)
        return [base * factor for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and texts: ``last_epoch``, ``base_lrs``, ``_last_lr``, ``_step_count`` as LambdaLR has them, and the schedule."""
        return {
            "last_epoch": self.last_epoch,
            "base_lrs": list(self.base_lrs),
            "_last_lr": list(self._last_lr),
            "_step_count": self._step_count,
            **self.config.state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to the step that was saved. The present schedule and initial rates count, not the saved ones; rates are set by them.

        UserWarning with the differences, unless made with ``override``. RuntimeError for a state without a step.
        """
        step = state_dict.get("last_epoch")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise RuntimeError(
                f"the state of a schedule has its step under 'last_epoch', got {step!r} there: give what state_dict() gave"
            )
        differences = self.config.differences(state_dict)
        if differences and not self.override:
            warnings.warn(
                f"the schedule was saved with {', '.join(differences)}: the present values count from here on; say "
                "override_opt_param_scheduler=True if that is meant",
                stacklevel=3,
            )
        self.last_epoch = step
        self._step_count = int(state_dict.get("_step_count", step + 1))
        self._set_rates()

    def _set_rates(self) -> None:
        groups = self.optimizer.param_groups
        keep_initial_rates(groups)
        self.base_lrs.extend(_as_number(group[INITIAL]) for group in groups[len(self.base_lrs) :])
        self._last_lr = self.get_lr()[: len(groups)]
        for group, rate in zip(groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Real):
                group["lr"] = rate
            else:
                get_platform().fill_(group["lr"], rate)


def groups_of(optimizer: Any) -> Sequence[dict[str, Any]]:
    """Its groups. ValueError if it has none."""
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, (list, tuple)):
        raise ValueError(
            f"a schedule sets the learning rates of param_groups, which {type(optimizer).__name__} has not: give an optimizer of "
            "hp_optim or torch.optim, or any object with a list of dicts under that name"
        )
    return groups


def keep_initial_rates(groups: Iterable[dict[str, Any]]) -> None:
    """``group["initial_lr"]`` is the rate of a group that has none yet; a tensor that groups share as their rate has one for all of them,
    which is not what a schedule has written there since.
    """
    of_tensors: dict[int, Any] = {}
    new = []
    for group in groups:
        if INITIAL not in group:
            new.append(group)
        elif not isinstance(group["lr"], Real):
            of_tensors[id(group["lr"])] = group[INITIAL]
    for group in new:
        known = of_tensors.get(id(group["lr"]))
        group[INITIAL] = _as_number(group["lr"] if known is None else known)


class _Watch:
    """Sees whether an optimizer makes a step, where it tells: by a hook that goes away with the first one."""

    def __init__(self, optimizer: Any) -> None:
        register = getattr(optimizer, "register_step_post_hook", None)
        self.has_stepped = register is None
        self._handle = None if register is None else register(self._see)

    def _see(self, *args: Any) -> None:
        self.has_stepped = True
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy watches nothing: copies of optimizers have no hooks."""
        return {"has_stepped": True, "_handle": None}


def _as_number(rate: Any) -> float:
    """Of a tensor once, when a group is first seen: it waits for the device."""
    return float(rate) if isinstance(rate, Real) else float(get_platform().to_numpy(rate).reshape(-1)[0])
