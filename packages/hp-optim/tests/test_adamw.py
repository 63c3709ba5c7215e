"""AdamW in one process: its numbers, what it counts, its state, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_optim import AdamW
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from adamw_oracle import NumpyAdamW

SHAPES = [(5, 3), (7,), (), (1, 2, 2), (0, 3)]
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no decay": {"weight_decay": 0.0, "lr": 0.1},
    "amsgrad": {"amsgrad": True, "betas": (0.5, 0.6), "lr": 0.05},
    "maximize": {"maximize": True, "weight_decay": 0.3, "eps": 1e-3},
}


def widest(world: World) -> str:
    return "float64" if world.platform.supports("float64_compute", world.device) else "float32"


class Twins:
    """Parameters and their oracles."""

    def __init__(self, world: World, dtype: str, **setting: Any) -> None:
        self.world, self.platform, self.dtype = world, world.platform, dtype
        self.random = np.random.default_rng(11)
        values = [np.asarray(self.random.uniform(-1, 1, shape), dtype) for shape in SHAPES]
        self.parameters = [
            self.platform.parameter(self.platform.tensor(value, dtype, world.device)) for value in values
        ]
        self.oracles = [NumpyAdamW(value, **setting) for value in values]

    def gradients(self, left_out: tuple[int, ...] = ()) -> None:
        """New ones for both; None for some."""
        self.given = []
        for number, parameter in enumerate(self.parameters):
            value = np.asarray(self.random.uniform(-1, 1, SHAPES[number]), self.dtype)
            self.given.append(None if number in left_out else value)
            gradient = None
            if number not in left_out:
                gradient = self.platform.tensor(value, self.dtype, self.world.device)
            self.platform.set_grad(parameter, gradient)

    def step_oracles(self) -> None:
        for oracle, gradient in zip(self.oracles, self.given, strict=True):
            oracle.step(gradient)

    def check(self) -> None:
        """Bit by bit on MindSpore. torch's kernels fuse some multiplications and additions: a few units in the last place a step."""
        exactly = self.platform.platform_type.value == "mindspore"
        eps = np.finfo(self.dtype).eps
        for parameter, oracle in zip(self.parameters, self.oracles, strict=True):
            actual = self.platform.to_numpy(self.platform.detach(parameter))
            if exactly:
                np.testing.assert_array_equal(actual, oracle.p)
            else:
                np.testing.assert_allclose(actual, oracle.p, rtol=0, atol=30 * eps)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", list(SETTINGS))
@distributed(world_size=1)
def test_every_step_gives_the_numbers_of_the_formula(world: World, name: str, dtype: str) -> None:
    if dtype == "float64" and widest(world) == "float32":
        dtype = "float32"
    twins = Twins(world, dtype, **SETTINGS[name])
    optimizer = AdamW(twins.parameters, **SETTINGS[name])
    for _ in range(4):
        twins.gradients()
        optimizer.step()
        twins.step_oracles()
        twins.check()
    assert optimizer.param_groups[0]["step"] == 4


@distributed(world_size=1)
def test_a_parameter_counts_the_steps_in_which_it_had_a_gradient(world: World) -> None:
    twins = Twins(world, widest(world), lr=0.1)
    optimizer = AdamW(twins.parameters, lr=0.1)
    for left_out in ((1, 3), (1,), (0, 2, 3), (0, 1), ()):
        twins.gradients(left_out)
        optimizer.step()
        twins.step_oracles()
        twins.check()
    missed = [optimizer.state[p].get("missed", 0) for p in twins.parameters]
    assert missed == [2, 3, 1, 2, 0]
    assert optimizer.param_groups[0]["step"] == 5


@distributed(world_size=1)
def test_a_parameter_that_never_had_a_gradient_has_no_state(world: World) -> None:
    twins = Twins(world, "float32")
    optimizer = AdamW(twins.parameters)
    for _ in range(2):
        twins.gradients((1,))
        optimizer.step()
    assert twins.parameters[1] not in optimizer.state
    assert set(optimizer.state_dict()["state"]) == {0, 2, 3, 4}
    for number in (0, 2, 3, 4):
        entry = optimizer.state[twins.parameters[number]]
        assert list(entry) == ["exp_avg", "exp_avg_sq"]
        assert all(tuple(value.shape) == SHAPES[number] for value in entry.values())


@distributed(world_size=1)
def test_a_group_that_comes_later_begins_with_its_first_step_and_counts_as_the_others(world: World) -> None:
    twins = Twins(world, widest(world), lr=0.1)
    optimizer = AdamW(twins.parameters[:3], lr=0.1)
    for _ in range(2):
        twins.gradients((3, 4))
        optimizer.step()
        twins.step_oracles()
    optimizer.add_param_group({"params": twins.parameters[3:]})
    for _ in range(2):
        twins.gradients()
        optimizer.step()
        twins.step_oracles()
        twins.check()
    assert [group["step"] for group in optimizer.param_groups] == [4, 4]
    assert [optimizer.state[p].get("missed", 0) for p in twins.parameters] == [0, 0, 0, 2, 2]


@distributed(world_size=1)
def test_groups_have_hyperparameters_of_their_own(world: World) -> None:
    twins = Twins(world, widest(world), lr=0.1)
    twins.oracles[1].lr, twins.oracles[1].weight_decay = 0.3, 0.0
    optimizer = AdamW(
        [
            {"params": [twins.parameters[n] for n in (0, 2, 3, 4)]},
            {"params": twins.parameters[1], "lr": 0.3, "weight_decay": 0.0},
        ],
        lr=0.1,
    )
    for _ in range(3):
        twins.gradients()
        optimizer.step()
        twins.step_oracles()
    twins.check()


@distributed(world_size=1)
def test_the_learning_rate_may_be_a_tensor(world: World) -> None:
    lr = 0.125
    twins = Twins(world, widest(world), lr=lr)
    held = world.platform.full((), lr, widest(world), world.device)
    optimizer = AdamW(twins.parameters, lr=held)
    for _ in range(2):
        twins.gradients()
        optimizer.step()
        twins.step_oracles()
    twins.check()
    assert optimizer.param_groups[0]["lr"] is held


@distributed(world_size=1)
def test_float32_main_grads_of_a_bfloat16_parameter_have_float32_state(world: World) -> None:
    platform = world.platform
    value = np.linspace(-1, 1, 7, dtype=np.float32)
    parameter = platform.parameter(platform.tensor(value, "bfloat16", world.device))
    oracle = NumpyAdamW(platform.to_numpy(platform.detach(parameter)), lr=0.1)
    optimizer = AdamW([parameter], lr=0.1, fused=False)
    random = np.random.default_rng(1)
    for _ in range(3):
        gradient = random.uniform(-1, 1, 7).astype(np.float32)
        parameter.main_grad = platform.tensor(gradient, "float32", world.device)
        optimizer.step()
        oracle.step(gradient)
        # The oracle's parameter is rounded as ours is: to bfloat16 at the end of every step.
        rounded = platform.tensor(oracle.p, "bfloat16", world.device)
        oracle.p = platform.to_numpy(rounded).astype(np.float32)
        actual = platform.to_numpy(platform.detach(parameter))
        # A value at the edge of two bfloat16 numbers may be rounded to either: a unit in the last of 8 bits.
        np.testing.assert_allclose(actual, oracle.p, rtol=2.0**-8, atol=0)
        oracle.p = actual.astype(np.float32)
    entry = optimizer.state[parameter]
    assert {platform.dtype_name(value.dtype) for value in entry.values()} == {"float32"}
    np.testing.assert_allclose(platform.to_numpy(entry["exp_avg"]), oracle.m, rtol=0, atol=1e-6)
    optimizer.zero_grad()
    assert parameter.main_grad is None


@distributed(world_size=1)
def test_training_goes_on_from_a_state_dict_as_if_nothing_had_been(world: World) -> None:
    twins = Twins(world, widest(world), lr=0.1, amsgrad=True)
    first = AdamW(twins.parameters, lr=0.1, amsgrad=True)
    for left_out in ((), (1,)):
        twins.gradients(left_out)
        first.step()
        twins.step_oracles()
    second = AdamW(twins.parameters, lr=3.0, amsgrad=True)
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["lr"] == 0.1
    for _ in range(2):
        twins.gradients()
        second.step()
        twins.step_oracles()
    twins.check()


@distributed(world_size=1)
def test_amsgrad_may_be_switched_on_later(world: World) -> None:
    twins = Twins(world, widest(world))
    optimizer = AdamW(twins.parameters, betas=(0.5, 0.5))
    twins.gradients()
    optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = True
    twins.gradients()
    optimizer.step()
    entry = optimizer.state[twins.parameters[0]]
    platform = world.platform
    top, second = (platform.to_numpy(entry[key]) for key in ("max_exp_avg_sq", "exp_avg_sq"))
    assert (top >= second).all()
    assert (top > second).any()


@distributed(world_size=1)
def test_a_step_of_a_group_without_any_gradient_changes_nothing_but_the_count(world: World) -> None:
    twins = Twins(world, "float32")
    optimizer = AdamW(twins.parameters)
    twins.gradients((0, 1, 2, 3, 4))
    optimizer.step()
    twins.check()
    assert optimizer.param_groups[0]["step"] == 1
    assert not optimizer.state


@distributed(world_size=1)
def test_the_closure_runs_first_and_gives_the_result(world: World) -> None:
    platform = world.platform
    parameter = platform.parameter(platform.full((2,), 1.0, "float32", world.device))
    optimizer = AdamW([parameter], lr=0.5)

    def closure() -> Any:
        loss = platform.sum(parameter * parameter)
        platform.backward([loss])
        return loss

    assert float(platform.to_numpy(platform.detach(optimizer.step(closure)))) == 2.0
    assert (platform.to_numpy(platform.detach(parameter)) < 0.51).all()
