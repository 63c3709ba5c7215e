"""Parameters that are DTensors and no mesh: they stay as they are, and units add up their gradients together, beside backward."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_fsdp.states import ShardState
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from compat_pairs import WAYS, Compat
from fsdp_models import sgd_step


@pytest.mark.parametrize("name", WAYS)
@distributed(world_size=(1, 2, 3, 4))
def test_training_equals_one_process_and_gradients_are_added_up_once_per_unit(
    world: World, name: str
) -> None:
    way = WAYS[name]
    ours, plain = Compat(world, way), Compat(world, way, None)
    for step in range(3):
        with count_collectives() as sent:
            ours.backward(step)
        with count_collectives() as sent_without:
            plain.backward(step)
        ours.backward_of_reference(step)
        ours.check()
        for dim in range(way.ndim):
            many = ours.mesh.size(dim) > 1
            if dim in way.data_dims:
                assert ours.sums(sent, dim) == (3 * many, ours.nbytes() * many)
                assert plain.sums(sent_without, dim) == (ours.num_parameters * many, ours.nbytes() * many)
            else:
                assert ours.sums(sent, dim) == plain.sums(sent_without, dim)
        assert sent.nbytes() == sent_without.nbytes()
        for kind in {*sent.counts, *sent_without.counts} - {"all_reduce"}:
            assert sent.counts[kind] == sent_without.counts[kind], kind
        ours.step()
        sgd_step(world.platform, plain.model)
    assert all(unit.state is ShardState.SHARDED for unit in ours.units)


@distributed(world_size=(2, 3))
def test_sums_of_a_unit_run_while_the_one_before_it_runs_backward(world: World) -> None:
    ours, launched = Compat(world, WAYS["replicate"]), []
    platform = world.platform

    def note(_: Any) -> None:
        launched.append(len(counted.record.launches))

    def watch(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        platform.register_tensor_hook(output.to_local(), note)

    for block in ours.model.blocks:
        platform.register_forward_hook(block, watch)
    with count_collectives() as counted:
        ours.backward(0)
    assert launched == [0, 1], "when gradients reach the second block, and the first"
    counted.assert_counts(all_reduce=3)


@pytest.mark.parametrize("name", ["replicate", "replicate, shard"])
@distributed(world_size=(2, 4))
def test_micro_batches_are_added_up_once(world: World, name: str) -> None:
    ours = Compat(world, WAYS[name])
    for step in range(2):
        for part in range(3):
            ours.model.set_requires_gradient_sync(part == 2)
            with count_collectives() as sent:
                ours.backward(3 * step + part)
            ours.backward_of_reference(3 * step + part)
            many = ours.mesh.size(0) > 1
            assert ours.sums(sent, 0)[0] == (3 * many if part == 2 else 0)
            if part < 2:
                assert all(parameter.grad is None for parameter in ours.own.values())
        ours.check()
        ours.step()


@distributed(world_size=2)
def test_without_fusion_operations_add_up_by_themselves(world: World) -> None:
    ours = Compat(world, WAYS["replicate"], comm_fusion=False)
    for step in range(2):
        with count_collectives() as sent:
            ours.backward(step)
        sent.assert_counts(all_reduce=ours.num_parameters)
        ours.backward_of_reference(step)
        ours.check()
        ours.step()


@distributed(world_size=2)
def test_gradients_are_scaled_once_and_hooks_see_them_whole(world: World) -> None:
    ours, seen = Compat(world, WAYS["replicate"]), {}
    ours.model.set_gradient_scaling_factor(0.25)

    def hook_of(name: str) -> Any:
        def note(parameter: Any) -> None:
            seen[name] = world.platform.to_numpy(parameter.grad.full_tensor())

        return note

    for name, parameter in ours.own.items():
        parameter.register_post_accumulate_grad_hook(hook_of(name))
    ours.backward(0)
    ours.backward_of_reference(0)
    ours.check(0.25)
    for name, parameter in ours.own.items():
        assert_parity(seen[name], world.platform.to_numpy(parameter.grad.full_tensor()), exact=True)
    with pytest.raises(ValueError, match="^reduce_op_type 'sum': parameters of .* are DTensors that stay"):
        ours.model.set_reduce_op_type("sum")
    ours.model.zero_grad()
    assert all(parameter.grad is None for parameter in ours.own.values())
