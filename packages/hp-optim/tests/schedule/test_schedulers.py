"""Schedulers of one optimizer and of many: names, states, resumption, tensors, warnings."""

from __future__ import annotations

import copy
import json
import re
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hp_optim import LRSchedulersContainer, get_hyper_lr_scheduler
from hp_platform.testing import World, distributed


class AdamW:
    """What a schedule needs of an optimizer."""

    def __init__(self, *rates: Any) -> None:
        self.param_groups = [{"lr": rate} for rate in rates]


class Muon(AdamW):
    """Another name."""


OPTIONS: dict[str, Any] = {"total_steps": 8, "decay_style": "linear", "lr": 1.0, "lr_min": 0.0}


def chain() -> Any:
    """As a chained optimizer shows its parts."""
    return SimpleNamespace(optimizers_dict={"adamw": AdamW(1.0, 2.0), "muon": Muon(4.0)})


def after(schedulers: LRSchedulersContainer, num_steps: int) -> LRSchedulersContainer:
    for _ in range(num_steps):
        schedulers.step()
    return schedulers


def test_a_chain_has_one_scheduler_for_each_optimizer() -> None:
    optimizers = chain()
    schedulers = after(get_hyper_lr_scheduler(optimizers, **OPTIONS), 2)
    assert len(schedulers) == 2
    assert [each.optimizer for each in schedulers] == list(optimizers.optimizers_dict.values())
    assert schedulers.get_last_lr() == [0.75, 1.5, 3.0]
    assert list(schedulers.state_dict()) == ["adamw", "muon"]


def test_one_optimizer_a_list_and_a_dict_are_named() -> None:
    def names(optimizer: Any) -> list[str]:
        return list(get_hyper_lr_scheduler(optimizer, **OPTIONS).state_dict())

    assert names(AdamW(1.0)) == ["adamw"]
    assert names([AdamW(1.0), Muon(1.0)]) == ["adamw", "muon"]
    assert names([Muon(1.0), AdamW(1.0), Muon(1.0)]) == ["muon_0", "adamw", "muon_1"]
    assert names({"body": Muon(1.0), "head": AdamW(1.0)}) == ["body", "head"]
    assert names(SimpleNamespace(optimizers_dict={})) == []


def test_a_state_is_plain_and_has_the_keys_of_lambda_lr_and_the_schedule() -> None:
    state = after(get_hyper_lr_scheduler(AdamW(1.0, np.float32(2.0)), **OPTIONS), 2).state_dict()["adamw"]
    assert json.loads(json.dumps(state)) == state == {
        "last_epoch": 2, "base_lrs": [1.0, 2.0], "_last_lr": [0.75, 1.5], "_step_count": 3,
        "total_steps": 8, "warmup_steps": 0, "warmup_ratio": 0.0, "decay_style": "linear", "lr": 1.0, "lr_min": 0.0,
        "lr_start": 0.0, "lr_decay_ratio": 1.0, "wsd_decay_steps": None, "lr_wsd_decay_style": "exponential",
    }  # fmt: skip


def test_a_resumed_schedule_goes_on_as_if_it_had_not_stopped() -> None:
    straight = after(get_hyper_lr_scheduler(chain(), **OPTIONS), 3)
    state = copy.deepcopy(straight.state_dict())
    resumed = get_hyper_lr_scheduler(chain(), **OPTIONS)
    resumed.load_state_dict(dict(reversed(state.items())))
    assert resumed.get_last_lr() == straight.get_last_lr()
    assert resumed.state_dict() == straight.state_dict() == state
    assert after(resumed, 2).get_last_lr() == after(straight, 2).get_last_lr()


def test_the_present_schedule_counts_when_another_one_was_saved() -> None:
    state = after(get_hyper_lr_scheduler(AdamW(1.0), **OPTIONS), 4).state_dict()
    options = {**OPTIONS, "total_steps": 16, "lr_min": 0.1}
    loud = get_hyper_lr_scheduler(AdamW(3.0), **options)
    with pytest.warns(UserWarning, match=r"saved with total_steps=8 \(now 16\), lr_min=0.0 \(now 0.1\)"):
        loud.load_state_dict(state)
    quiet = get_hyper_lr_scheduler(AdamW(3.0), **options, override_opt_param_scheduler=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet.load_state_dict(state)
    for schedulers in (loud, quiet):
        assert schedulers.get_last_lr() == [3.0 * 0.75]
        assert next(iter(schedulers)).base_lrs == [3.0]


def test_groups_that_are_added_later_are_scheduled_from_the_next_step_on() -> None:
    optimizer = AdamW(1.0)
    schedulers = after(get_hyper_lr_scheduler(optimizer, **OPTIONS), 2)
    optimizer.param_groups.append({"lr": 8.0})
    assert after(schedulers, 1).get_last_lr() == [0.625, 5.0]


def test_a_group_that_knows_its_initial_rate_keeps_it() -> None:
    """As after an optimizer's state was loaded: its rate is then that of a later step."""
    optimizer = AdamW(0.25)
    optimizer.param_groups[0]["initial_lr"] = 2.0
    assert get_hyper_lr_scheduler(optimizer, **OPTIONS).get_last_lr() == [2.0]


def test_a_schedule_can_be_copied_with_its_optimizer() -> None:
    schedulers = after(get_hyper_lr_scheduler(AdamW(1.0), **OPTIONS), 1)
    twin = copy.deepcopy(schedulers)
    assert after(twin, 1).get_last_lr() == [0.75]
    assert schedulers.get_last_lr() == [0.875]


def test_one_failing_name_changes_nothing() -> None:
    schedulers = after(get_hyper_lr_scheduler(chain(), **OPTIONS), 1)
    before = copy.deepcopy(schedulers.state_dict())
    other = after(get_hyper_lr_scheduler({"adamw": AdamW(1.0), "sgd": AdamW(1.0)}, **OPTIONS), 5).state_dict()
    with pytest.raises(RuntimeError, match="no schedule for muon; it has those of adamw, sgd"):
        schedulers.load_state_dict(other)
    with pytest.raises(RuntimeError, match=r"1 schedules \(adamw\), this run 2 \(adamw, muon\)"):
        schedulers.load_state_dict({"adamw": other["adamw"]})
    with pytest.raises(RuntimeError, match="step under 'last_epoch', got None"):
        schedulers.load_state_dict({"adamw": {}, "muon": other["adamw"]})
    assert schedulers.state_dict() == before


@distributed(world_size=1)
def test_a_rate_that_is_a_tensor_is_written_in_place(world: World) -> None:
    platform = world.platform
    rate = platform.full((), 2.0, "float32", world.device)
    optimizer = AdamW(rate, 1.0)
    schedulers = after(get_hyper_lr_scheduler(optimizer, **OPTIONS), 2)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(platform.to_numpy(rate)) == 1.5
    assert schedulers.get_last_lr() == [1.5, 0.75]
    assert schedulers.state_dict()["adamw"]["base_lrs"] == [2.0, 1.0]


@distributed(world_size=1)
def test_a_tensor_that_is_the_rate_of_several_has_one_initial_rate(world: World) -> None:
    platform = world.platform
    rate = platform.full((), 2.0, "float32", world.device)
    optimizers = SimpleNamespace(optimizers_dict={"adamw": AdamW(rate, rate), "muon": Muon(rate)})
    schedulers = get_hyper_lr_scheduler(optimizers, **{**OPTIONS, "warmup_steps": 2})
    after(schedulers, 1)
    optimizers.optimizers_dict["adamw"].param_groups.append({"lr": rate})
    after(schedulers, 1)
    assert schedulers.get_last_lr() == [2.0] * 4
    assert float(platform.to_numpy(rate)) == 2.0


def test_a_wrong_optimizer_among_others_changes_nothing() -> None:
    first = AdamW(1.0)
    with pytest.raises(ValueError, match="which object has not"):
        get_hyper_lr_scheduler([first, object()], **{**OPTIONS, "warmup_steps": 2})
    assert first.param_groups == [{"lr": 1.0}]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "style": ({"decay_style": "cosin"}, "decay_style is 'cosin'; it is one of 'constant', 'linear', 'cosine', 'WSD'"),
    "shape": ({"lr_wsd_decay_style": "sqrt"}, "lr_wsd_decay_style is 'sqrt'; it is one of 'linear', 'cosine', 'exponential', 'minus_sqrt'"),
    "total": ({"total_steps": 0}, "total_steps is 0; a schedule has at least 1 step"),
    "total float": ({"total_steps": 8.0}, "total_steps is 8.0; it is a whole number of optimizer steps"),
    "floor": ({"lr_min": -1e-3}, "lr_min is -0.001; a learning rate is not negative"),
    "order": ({"lr": 0.1, "lr_min": 0.2}, "lr is 0.1, below lr_min, which is 0.2"),
    "peak": ({"lr": 0.0}, "lr is 0.0; the peak of the schedule is above 0"),
    "nan": ({"lr_start": float("nan")}, "lr_start is nan; it is a finite number"),
    "text": ({"lr": "1e-4"}, "lr is '1e-4'; it is a finite number"),
    "warm-up": ({"warmup_steps": 8}, "the warm-up of 8 steps (warmup_steps=8, warmup_ratio=0.0) takes all of total_steps=8"),
    "ratio": ({"warmup_ratio": 1.0}, "the warm-up of 8 steps (warmup_steps=0, warmup_ratio=1.0) takes all"),
    "negative ratio": ({"warmup_ratio": -0.1}, "warmup_ratio is -0.1; it is a part of total_steps, 0 or more"),
    "negative end": ({"lr_decay_ratio": -1.0}, "lr_decay_ratio is -1.0; it is a part of total_steps, 0 or more"),
    "no window": ({"decay_style": "WSD"}, "decay_style='WSD' needs wsd_decay_steps"),
    "empty window": ({"decay_style": "WSD", "wsd_decay_steps": 0}, "wsd_decay_steps is 0; the decay is a part of the training, 1 to total_steps=8"),
    "long window": ({"decay_style": "WSD", "wsd_decay_steps": 9}, "wsd_decay_steps is 9; the decay is a part"),
    "window float": ({"decay_style": "WSD", "wsd_decay_steps": 2.5}, "wsd_decay_steps is 2.5; it is a whole number"),
    "override": ({"override_opt_param_scheduler": 1}, "override_opt_param_scheduler is True or False, got 1"),
    "no groups": ({"optimizer": object()}, "sets the learning rates of param_groups, which object has not"),
    "twice": ({"optimizer": [ONE := AdamW(1.0), ONE]}, "an optimizer is given twice among 'adamw_0', 'adamw_1'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_told_what_was_given_and_what_to_change(name: str) -> None:
    options, message = WRONG[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        get_hyper_lr_scheduler(**{"optimizer": AdamW(1.0), **OPTIONS, **options})


def test_a_container_takes_schedulers_only() -> None:
    with pytest.raises(
        ValueError, match="the scheduler 'adamw', a AdamW, has no step, get_last_lr, state_dict"
    ):
        LRSchedulersContainer({"adamw": AdamW(1.0)})
    with pytest.raises(ValueError, match="schedulers is a list; it is a dict from names"):
        LRSchedulersContainer([])  # type: ignore[arg-type]
