"""Parameters that are laid out over other mesh dims: what is frozen, used twice, failed, tied."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import DTensor, Replicate, distribute_tensor
from hp_fsdp import fully_shard, get_model_state_dict, memory_plan
from hp_fsdp.unit import units_in
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from compat_pairs import WAYS, Compat, build
from fsdp_models import local, loss_of, tolerance


@distributed(world_size=(2, 3))
def test_parameters_may_be_used_alike_and_differently_inside_and_outside(world: World) -> None:
    """Also twice, and tied: the parts add up to the gradient of one process."""
    platform = world.platform
    ours = Compat(world, WAYS["replicate"], None)
    for model in (ours.reference, ours.model):
        model.blocks[1].outer.weight = model.blocks[0].outer.weight
    ours.own = dict(platform.named_parameters(ours.model))
    for module in (*ours.model.blocks, ours.model):
        fully_shard(module)

    def loss(model: Any, x: Any) -> Any:
        first = model.blocks[0]
        x = first(first(x))  # outside of the root: a root of its own, until the root runs
        penalty = platform.mean(model.head.weight * model.head.weight) + platform.mean(x * model.scale)
        return loss_of(platform, model(x)) + penalty

    for step in range(2):
        for model, x in ((ours.model, ours.inputs(step)), (ours.reference, ours.values(step))):

            def inside(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
                return output + platform.mean(module.inner.weight * module.inner.weight)

            handle = platform.register_forward_hook(model.blocks[0], inside, prepend=True)
            platform.backward([loss(model, x)])
            handle.remove()
        ours.check()
        ours.step()


@distributed(world_size=2)
def test_frozen_and_unused_parameters_get_no_gradient(world: World) -> None:
    ours, platform = Compat(world, WAYS["replicate"]), world.platform
    for model in (ours.model, ours.reference):
        platform.set_requires_grad_(local(model.blocks[0].inner.weight), False)
        model.blocks[1].forward = lambda x: x * 2
    for step in range(2):
        with count_collectives() as sent:
            ours.backward(step)
        sent.assert_counts(all_reduce=2)
        ours.backward_of_reference(step)
        ours.check()
        ours.step()


@distributed(world_size=2)
def test_a_failed_backward_adds_nothing(world: World) -> None:
    ours, platform = Compat(world, WAYS["replicate"]), world.platform

    def fail(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    ours.model.set_requires_gradient_sync(False)
    ours.backward(0)
    ours.backward_of_reference(0)

    def watch(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        platform.register_tensor_hook(output.to_local(), fail)

    handle = platform.register_forward_hook(
        ours.model.blocks[1], watch
    )  # behind the head, before any unit is done
    with pytest.raises(ArithmeticError):
        ours.backward(1)
    handle.remove()
    ours.model.set_requires_gradient_sync(True)
    ours.backward(2)
    ours.backward_of_reference(2)
    ours.check()


@distributed(world_size=2)
def test_memory_of_other_values_and_states_are_as_ever(world: World) -> None:
    """``p.data = x`` puts other memory below a parameter; states are those of the DTensors."""
    ours, platform = Compat(world, WAYS["replicate"]), world.platform
    ours.backward(0)
    ours.backward_of_reference(0)
    ours.step()
    for name, parameter in ours.own.items():
        whole = dict(platform.named_parameters(ours.reference))[name]
        platform.set_data_(local(parameter), platform.clone(platform.detach(local(parameter))))
        assert_parity(platform.detach(parameter), platform.detach(whole), **tolerance(world))
    ours.backward(1)
    ours.backward_of_reference(1)
    ours.check()
    state = get_model_state_dict(ours.model)
    assert list(state) == list(ours.own)
    assert all(isinstance(value, DTensor) for value in state.values())
    assert memory_plan(ours.model).shards == ours.nbytes()


@distributed(world_size=2)
def test_a_tie_across_units_with_and_without_a_mesh_is_refused(world: World) -> None:
    platform, model, mesh = world.platform, build(world), init_device_mesh(world.device_type, (world.size,))
    for _, module in platform.named_modules(model.blocks[0]):
        for name, parameter in list(platform.named_parameters(module, recurse=False)):
            dtensor = distribute_tensor(platform.detach(parameter), mesh, [Replicate()])
            platform.set_parameter(module, name, platform.parameter(dtensor))
    fully_shard(model.blocks[0])
    model.blocks[1].outer.weight = model.blocks[0].outer.weight
    with pytest.raises(
        ValueError, match=r"^parameter 'blocks.1.outer.weight' of Model is also .*only one of"
    ):
        fully_shard(model, mesh)
    assert [unit.modules[0] for unit in units_in(platform, model)] == [model.blocks[0]]
