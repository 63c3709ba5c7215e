"""Schedules on torch's own optimizers, beside torch's own schedulers."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hp_optim import LRSchedulersContainer, get_hyper_lr_scheduler


def optimizer(*rates: Any, kind: Callable[..., Any] = torch.optim.SGD) -> Any:
    return kind(
        [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates or (0.5,)], lr=1.0
    )


def test_rates_are_those_of_lambda_lr_with_the_same_multiplier() -> None:
    own, theirs = optimizer(0.5, 2.0), optimizer(0.5, 2.0)
    schedulers = get_hyper_lr_scheduler(own, 10, warmup_steps=3, lr=1.0, lr_min=0.1)
    multiplier = next(iter(schedulers)).config.multiplier
    reference = torch.optim.lr_scheduler.LambdaLR(theirs, multiplier)
    for _ in range(12):
        assert [group["lr"] for group in own.param_groups] == [group["lr"] for group in theirs.param_groups]
        assert schedulers.get_last_lr() == reference.get_last_lr()
        for each in (own, theirs, schedulers, reference):
            each.step()
    state, other = schedulers.state_dict()["sgd"], reference.state_dict()
    assert {key: state[key] for key in ("last_epoch", "base_lrs", "_last_lr", "_step_count")} == {
        key: other[key] for key in ("last_epoch", "base_lrs", "_last_lr", "_step_count")
    }


def test_stepping_before_the_optimizer_warns_once() -> None:
    schedulers = get_hyper_lr_scheduler(optimizer(), 10)
    with pytest.warns(UserWarning, match="stepped before the optimizer, so the learning rate of step 0"):
        schedulers.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedulers.step()


def test_stepping_after_the_optimizer_does_not_warn_and_leaves_no_hook() -> None:
    trained = optimizer()
    schedulers = get_hyper_lr_scheduler(trained, 10)
    trained.step()
    assert not trained._optimizer_step_post_hooks
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedulers.step()


def test_a_captured_rate_is_the_same_tensor_at_every_step() -> None:
    rate = torch.tensor(0.5)
    trained = optimizer(rate, kind=torch.optim.Adam)
    schedulers = get_hyper_lr_scheduler(trained, 4, decay_style="linear", lr=1.0, lr_min=0.0)
    trained.step()
    schedulers.step()
    assert trained.param_groups[0]["lr"] is rate
    assert rate.item() == 0.375


def test_a_container_holds_torchs_schedulers_too() -> None:
    trained = optimizer()
    container = LRSchedulersContainer({"sgd": torch.optim.lr_scheduler.StepLR(trained, 1, 0.5)})
    trained.step()
    container.step()
    assert container.get_last_lr() == [0.25]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_an_optimizer_of_its_own_and_warns_of_nothing(copied: Callable[[Any], Any]) -> None:
    schedule = get_hyper_lr_scheduler(optimizer(), 10, decay_style="linear", lr=1.0, lr_min=0.0)
    twin = copied(schedule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin.step()
    assert twin.get_last_lr() == [0.45]
    assert next(iter(twin)).optimizer.param_groups[0]["lr"] == 0.45
    assert next(iter(schedule)).optimizer.param_groups[0]["lr"] == 0.5


def test_a_resumed_run_goes_on_with_the_optimizers_state() -> None:
    def make() -> tuple[Any, LRSchedulersContainer]:
        trained = optimizer(0.5, 2.0)
        return trained, get_hyper_lr_scheduler(trained, 10, warmup_ratio=0.2, lr=1.0, lr_min=0.0)

    straight, schedule = make()
    for _ in range(4):
        straight.step()
        schedule.step()
    resumed, other = make()
    resumed.load_state_dict(straight.state_dict())
    other.load_state_dict(schedule.state_dict())
    for each in (straight, schedule, resumed, other):
        each.step()
    assert other.get_last_lr() == schedule.get_last_lr()
    assert [group["lr"] for group in resumed.param_groups] == [group["lr"] for group in straight.param_groups]
