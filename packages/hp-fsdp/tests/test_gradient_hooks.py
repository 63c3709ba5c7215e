"""Hooks that users register on sharded parameters run behind the reduction."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import PROGRAMS, Maker, local, loss_of, make_mesh, tolerance


def trained(world: World) -> tuple[Any, Any]:
    program = PROGRAMS["mlp"]
    model = program.shard(program.build(Maker(world)), make_mesh(world))

    def backward() -> None:
        inputs = program.inputs(Maker(world), world.rank, 0)
        world.platform.backward([loss_of(world.platform, model(inputs))])

    return model, backward


@distributed(world_size=2)
def test_a_hook_sees_the_parameter_with_its_mean_gradient_once_per_backward(world: World) -> None:
    platform = world.platform
    model, backward = trained(world)
    parameter, seen = model.head.weight, []
    handle = parameter.register_post_accumulate_grad_hook(
        lambda p: seen.append((p is parameter, platform.to_numpy(platform.get_grad(local(p)))))
    )
    for expected in (1, 2):
        backward()
        assert len(seen) == expected
        is_same, gradient = seen[-1]
        assert is_same
        assert_parity(platform.get_grad(local(parameter)), gradient, **tolerance(world))
    assert_parity(seen[1][1], 2 * seen[0][1], **tolerance(world))
    handle.remove()
    handle.remove()
    backward()
    assert len(seen) == 2


@distributed(world_size=2)
def test_a_step_in_a_hook_takes_the_place_of_the_optimizer(world: World) -> None:
    platform = world.platform
    (model, backward), (other, other_backward) = trained(world), trained(world)

    def step(parameter: Any) -> None:
        platform.add_(local(parameter), platform.get_grad(local(parameter)), alpha=-0.1)
        platform.set_grad(local(parameter), None)

    for _, parameter in platform.named_parameters(model):
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        backward()
        other_backward()
        for _, parameter in platform.named_parameters(other):
            step(parameter)
    for (_, one), (_, two) in zip(
        platform.named_parameters(model), platform.named_parameters(other), strict=True
    ):
        assert platform.get_grad(local(one)) is None
        assert_parity(local(one), local(two), **tolerance(world))


@distributed(world_size=2, backends="torch")
def test_a_copy_of_a_parameter_has_no_hooks(world: World) -> None:
    model, backward = trained(world)
    seen: list[Any] = []
    model.head.weight.register_post_accumulate_grad_hook(seen.append)
    twin = copy.deepcopy(model.head.weight)
    backward()
    assert len(seen) == 1
    assert seen[0] is not twin


@distributed(world_size=2)
def test_hooks_that_would_never_run_are_refused(world: World) -> None:
    model, _ = trained(world)
    with pytest.raises(
        RuntimeError, match="register_hook: the gradient .* does not come by autograd, .*post_accumulate"
    ):
        model.head.weight.register_hook(lambda gradient: gradient * 2)
