"""What all optimizers share, shown by plain gradient descent: groups, names, gradients, state, state dicts, refusals."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from hp_optim.base import OptimizerSteps, gradient_of
from hp_optim.checks import check_learning_rate, check_number
from hp_optim.make_class import make_optimizer_class
from hp_optim.pieces import local_of
from hp_platform import get_platform
from hp_platform.testing import World, distributed


class DescentSteps(OptimizerSteps):
    """Gradient descent that counts its steps by parameter."""

    HYPERPARAMETERS = frozenset({"lr"})

    def __init__(self, params: Any, lr: Any = 0.5, **unknown: Any) -> None:
        super().__init__(params, {"lr": lr}, unknown)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_learning_rate(self.platform, type(self).__name__, group["lr"])

    def _update(self) -> None:
        for group in self.param_groups:
            group["step"] = group["step"] + 1
            for parameter in group["params"]:
                gradient = gradient_of(parameter)
                if gradient is not None:
                    self.platform.add_(local_of(parameter), local_of(gradient), -group["lr"])
                    entry = self.state[parameter]
                    entry["sum"] = entry.get("sum", 0.0) + gradient


def descent(params: Any, **kwargs: Any) -> Any:
    return make_optimizer_class("Descent", DescentSteps)(params, **kwargs)


def parameter(*values: float, gradient: float | None = 1.0) -> Any:
    platform = get_platform()
    made = platform.parameter(platform.tensor(list(values), "float32"))
    if gradient is not None:
        platform.set_grad(made, platform.full((len(values),), gradient, "float32"))
    return made


def values(x: Any) -> list[float]:
    platform = get_platform()
    return np.asarray(platform.to_numpy(platform.detach(x)), np.float64).tolist()


@distributed(world_size=1)
def test_parameters_come_alone_in_groups_and_in_pairs(world: World) -> None:
    a, b = parameter(1.0, 2.0), parameter(3.0)
    for given, names in (
        ([a, b], None),
        (iter([a, b]), None),
        ([("a", a), ("b", b)], ["a", "b"]),
    ):
        optimizer = descent(given)
        (group,) = optimizer.param_groups
        assert [id(p) for p in group["params"]] == [id(a), id(b)]
        assert group.get("param_names") == names
        assert (group["lr"], group["step"]) == (0.5, 0)
    optimizer = descent([{"params": a, "lr": 0.25}, {"params": [b], "name": "rest"}], lr=2.0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 2.0]
    assert optimizer.param_groups[1]["name"] == "rest"


@distributed(world_size=1)
def test_the_group_that_was_given_is_not_changed(world: World) -> None:
    given = {"params": [("a", parameter(1.0))]}
    descent([given])
    assert set(given) == {"params"}
    assert isinstance(given["params"][0], tuple)


@distributed(world_size=1)
def test_a_step_updates_what_has_a_gradient_and_calls_the_closure_with_recording_on(world: World) -> None:
    a, b = parameter(1.0, 2.0), parameter(3.0, gradient=None)
    optimizer = descent([a, b])

    def closure() -> str:
        assert world.platform.is_grad_enabled()
        return "loss"

    assert optimizer.step(closure) == "loss"
    assert values(a) == [0.5, 1.5]
    assert values(b) == [3.0]
    assert b not in optimizer.state
    assert optimizer.step() is None


@distributed(world_size=1)
def test_main_grad_goes_before_grad_and_both_are_forgotten(world: World) -> None:
    platform, a = world.platform, parameter(1.0)
    wide = platform.full((1,), 0.25, "float64")
    a.main_grad = wide
    assert gradient_of(a) is wide
    optimizer = descent([a])
    optimizer.zero_grad(set_to_none=False)
    assert values(wide) == [0.0]
    assert values(platform.get_grad(a)) == [0.0]
    optimizer.zero_grad()
    assert a.main_grad is None
    assert platform.get_grad(a) is None
    assert gradient_of(a) is None


@distributed(world_size=1)
def test_zero_grad_can_fill_instead(world: World) -> None:
    a = parameter(1.0, 2.0)
    descent([a]).zero_grad(set_to_none=False)
    assert values(world.platform.get_grad(a)) == [0.0, 0.0]


@distributed(world_size=1)
def test_a_state_dict_is_taken_by_another_optimizer_that_shares_no_memory(world: World) -> None:
    platform = world.platform
    a, b = parameter(1.0, 2.0), parameter(3.0, gradient=None)
    first = descent([{"params": [a]}, {"params": [b], "lr": 0.125}])
    first.step()
    saved = first.state_dict()
    assert [group["params"] for group in saved["param_groups"]] == [[0], [1]]
    assert set(saved["state"]) == {0}
    c, d = parameter(0.0, 0.0), parameter(0.0)
    second = descent([{"params": [c]}, {"params": [d]}])
    second.load_state_dict(saved)
    assert [(group["lr"], group["step"]) for group in second.param_groups] == [(0.5, 1), (0.125, 1)]
    assert values(second.state[c]["sum"]) == [1.0, 1.0]
    platform.fill_(first.state[a]["sum"], 7.0)
    assert values(second.state[c]["sum"]) == [1.0, 1.0]
    assert d not in second.state


@distributed(world_size=1)
def test_state_keeps_its_dtype_when_it_is_loaded(world: World) -> None:
    platform = world.platform
    a, b = parameter(1.0), parameter(1.0)
    a.main_grad = platform.full((1,), 1.0 / 3.0, "float64")
    first = descent([a])
    for group in first.param_groups:
        group["step"] = 1
    first.state[a] = {"sum": a.main_grad, "note": "kept"}
    second = descent([b])
    second.load_state_dict(first.state_dict())
    assert platform.dtype_name(second.state[b]["sum"].dtype) == "float64"
    assert values(second.state[b]["sum"]) == [1.0 / 3.0]
    assert second.state[b]["note"] == "kept"


@distributed(world_size=1)
def test_groups_are_added_and_checked(world: World) -> None:
    a, b = parameter(1.0), parameter(2.0)
    optimizer = descent([a])
    optimizer.add_param_group({"params": b, "lr": 0.1})
    assert len(optimizer.param_groups) == 2
    with pytest.raises(ValueError, match="is in another group already: leave it in one of them"):
        optimizer.add_param_group({"params": [b]})
    with pytest.raises(ValueError, match="give all as .name, parameter. pairs, or none"):
        optimizer.add_param_group({"params": [("c", parameter(1.0))]})
    with pytest.raises(ValueError, match="lr is -1; it must be a finite number, at least 0"):
        optimizer.add_param_group({"params": [parameter(1.0)], "lr": -1})
    assert len(optimizer.param_groups) == 2


WRONG: dict[str, tuple[Any, str]] = {
    "none": (lambda: descent([]), "params is empty; an optimizer has at least one parameter"),
    "a number": (lambda: descent(3), "params is a int, which is not iterable: give model.parameters()"),
    "a tensor": (lambda: descent(parameter(1.0)), "put it into a list"),
    "a dict": (lambda: descent({"params": [parameter(1.0)]}), "put it into a list"),
    "an array": (
        lambda: descent([np.zeros(2)]),
        "parameter 0 is a numpy.ndarray; parameters are tensors of the one framework of this process",
    ),
    "mixed with groups": (
        lambda: descent([{"params": [parameter(1.0)]}, parameter(1.0)]),
        r"params has groups \(dicts\) and, at 1, a \w+: give groups only, or parameters only",
    ),
    "no params": (lambda: descent([{"lr": 1.0}]), "group 0: a group needs 'params', its keys are \\['lr'\\]"),
    "a set": (lambda: descent([{"params": {1}}]), "'params' is a set, whose order differs from run to run"),
    "some pairs": (
        lambda: descent([("a", parameter(1.0)), parameter(1.0)]),
        r"some parameters come as \(name, parameter\) pairs and some alone",
    ),
    "triples": (
        lambda: descent([("a", parameter(1.0), 2)]),
        r"a pair is \(name, parameter\), got a tuple of 3 entries: give model.named_parameters\(\)",
    ),
    "integers": (
        lambda: descent([("ids", get_platform().arange(0, 3))]),
        "parameter 'ids', of shape \\(3,\\), has dtype .*; optimizers update floating-point parameters",
    ),
    "made": (
        lambda: descent([parameter(1.0) * 2.0]),
        "was made by an operation and gathers no gradient: give the parameter that it was made from",
    ),
    "unknown": (
        lambda: descent([parameter(1.0)], momentum=0.9, betas=1),
        "Descent has no 'betas', 'momentum'; it takes lr: remove or rename",
    ),
    "misspelt": (
        lambda: descent([{"params": [parameter(1.0)], "lrr": 1.0}]),
        "a group has the key 'lrr', which is no hyperparameter and would be ignored; did you mean 'lr'",
    ),
    "nan": (lambda: descent([parameter(1.0)], lr=float("nan")), "lr is nan; it must be a finite number"),
    "lr tensor": (
        lambda: descent([parameter(1.0)], lr=get_platform().zeros((2,))),
        r"lr is a tensor of shape \(2,\); as a tensor it has one element",
    ),
}


def twice() -> Any:
    a = parameter(1.0)
    return descent([a, a])


def from_before() -> Any:
    a = parameter(1.0)
    a._hp_fsdp_successor = object()
    return descent([("layer.weight", a)])


WRONG["twice"] = (twice, "a parameter stands there twice and would be updated twice in a step")
WRONG["from before"] = (
    from_before,
    r"parameter 'layer.weight', of shape \(1,\), is a parameter from before fully_shard.*make the optimizer after fully_shard",
)


@pytest.mark.parametrize("name", list(WRONG))
@distributed(world_size=1)
def test_wrong_parameters_and_hyperparameters_are_refused(world: World, name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call()


@distributed(world_size=1)
def test_a_step_of_parameters_that_were_replaced_since_is_refused(world: World) -> None:
    a, b = parameter(1.0), parameter(2.0)
    sharded, parallel = descent([("a", a), ("b", b)]), descent([{"params": [a]}, {"params": [b]}])
    b._hp_fsdp_successor = object()
    with pytest.raises(
        ValueError,
        match=r"\.step: parameter 'b', of shape \(1,\), is a parameter from before fully_shard.*make the optimizer after fully_shard",
    ):
        sharded.step()
    assert (values(a), sharded.param_groups[0]["step"]) == ([1.0], 0)
    b._hp_fsdp_successor = None
    b._hp_dtensor_replaced = "parallelize_module"
    parallel.step()  # it has a gradient: something uses it
    assert values(b) == [1.5]
    parallel.zero_grad()
    with pytest.raises(
        ValueError,
        match=r"parameter 0 of group 1, of shape \(1,\), is a parameter from before parallelize_module.*after parallelize_module",
    ):
        parallel.step()


@pytest.mark.once
def test_numbers_are_checked_with_their_bounds() -> None:
    check_number("X", "beta", 0.5, below=1.0, advice="")
    for wrong in (True, "1", -0.1, 1.0, float("inf")):
        with pytest.raises(ValueError, match=re.escape(f"X: beta is {wrong!r}; it must be a finite number")):
            check_number("X", "beta", wrong, below=1.0, advice="take 0.9")


@distributed(world_size=1)
def test_a_state_dict_of_other_groups_is_refused(world: World) -> None:
    saved = descent([parameter(1.0), parameter(2.0)]).state_dict()
    with pytest.raises(ValueError, match="group"):
        descent([parameter(1.0)]).load_state_dict(saved)
