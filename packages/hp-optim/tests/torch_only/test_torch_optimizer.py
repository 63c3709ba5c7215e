"""On torch the optimizers are torch's: schedulers, hooks, pickles, copies, GradScaler and DCP take them."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import torch

from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_base import DescentSteps, descent, parameter, values


def two(**kwargs: Any) -> tuple[Any, Any]:
    a = parameter(1.0, 2.0)
    return a, descent([("a", a)], **kwargs)


@distributed(world_size=1)
def test_it_is_an_optimizer_of_torch(world: World) -> None:
    _, optimizer = two()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, DescentSteps)
    assert type(optimizer).__name__ == "Descent"
    assert type(optimizer).__module__ == "hp_optim"
    assert type(optimizer).__doc__ == DescentSteps.__doc__


@distributed(world_size=1)
def test_hooks_run_around_a_step_and_around_state_dicts(world: World) -> None:
    a, optimizer = two()
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(f"before {values(a)}"))
    optimizer.register_step_post_hook(lambda *_: seen.append(f"after {values(a)}"))
    optimizer.step()
    assert seen == ["before [1.0, 2.0]", "after [0.5, 1.5]"]

    def renamed(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        entry = dict(state_dict["state"][0], told="by a hook")
        return {**state_dict, "state": {0: entry}}

    optimizer.register_load_state_dict_pre_hook(renamed)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[a]["told"] == "by a hook"


@distributed(world_size=1)
def test_lambda_lr_sets_the_learning_rate_of_every_group(world: World) -> None:
    a, b = parameter(1.0), parameter(1.0)
    optimizer = descent([{"params": [a]}, {"params": [b], "lr": 0.25}])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for _ in range(2):
        optimizer.step()
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.0625]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert values(a) == [1.0 - 0.5 - 0.25]


@distributed(world_size=1, backends=("torch", "cuda", "npu"))
def test_a_copy_has_parameters_and_state_of_its_own(world: World) -> None:
    a, optimizer = two()
    optimizer.step()
    other = copy.deepcopy(optimizer)
    (own,) = other.param_groups[0]["params"]
    assert own is not a
    assert values(other.state[own]["sum"]) == [1.0, 1.0]
    other.param_groups[0]["params"][0].grad = torch.ones(2)
    other.step()
    assert (values(a), values(own)) == ([0.5, 1.5], [0.0, 1.0])


@distributed(world_size=1)
def test_grad_scaler_leaves_out_a_step_whose_gradients_overflow(world: World) -> None:
    # On the device of the scaler: torch's own reads its scale on the host before the copy of it has come.
    a = torch.nn.Parameter(torch.tensor([1.0, 2.0], device=world.device))
    optimizer = descent([("a", a)])
    scaler = torch.amp.GradScaler(world.device, init_scale=4.0, enabled=True)
    scaler.scale(torch.ones((), device=world.device))
    for gradient, expected, steps in ((float("inf"), [1.0, 2.0], 0), (8.0, [0.0, 1.0], 1)):
        a.grad = torch.full((2,), gradient, device=world.device)
        scaler.step(optimizer)
        scaler.update(4.0)
        assert values(a) == expected
        assert optimizer.param_groups[0]["step"] == steps


@distributed(world_size=1)
def test_dcp_reads_and_writes_the_state(world: World) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def made() -> tuple[torch.nn.Module, Any]:
        model = torch.nn.Linear(2, 1, bias=False)
        return model, descent(model.parameters())

    (model, optimizer), (other_model, other) = made(), made()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer)
    assert set(saved["state"]) == {"weight"}
    assert values(saved["state"]["weight"]["sum"][0]) == [1.0, 1.0]
    set_optimizer_state_dict(other_model, other, saved)
    assert values(other.state[other_model.weight]["sum"][0]) == [1.0, 1.0]
    assert other.param_groups[0]["step"] == 1


@distributed(world_size=1)
def test_state_and_groups_travel_through_a_pickle(world: World) -> None:
    _, optimizer = two()
    optimizer.step()
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    a, other = two()
    other.load_state_dict(saved)
    assert values(other.state[a]["sum"]) == [1.0, 1.0]
    assert other.param_groups[0]["param_names"] == ["a"]
