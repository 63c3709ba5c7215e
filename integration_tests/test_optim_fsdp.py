"""AdamW on what fully_shard makes of parameters: flat rows, replicas, main_grad, offloaded shards, beside whole tensors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from hp_dtensor import Replicate
from hp_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from hp_optim import AdamW
from hp_platform.testing import World, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from optim_twins import ROWS, Shadow, make_model, mesh_of, replica_counts, widest


@distributed(world_size=(1, 2, 3, 4), timeout=240)
def test_every_step_has_the_bits_of_whole_tensors_with_the_same_gradients(world: World) -> None:
    for replicas in replica_counts(world):
        undivided = {"amsgrad": True, "divide_replicas": False}
        for options in ({}, undivided) if replicas == world.size else ({},):
            twins = Shadow(world, mesh_of(world, replicas), options=options)
            for step, uses_extra in enumerate((True, True, False, True, False)):
                twins.backward(step, uses_extra=uses_extra)
                twins.update()
            twins.check()
            missed = [
                (twins.optimizer.state.get(p) or {}).get("missed", 0) for p in twins.parameters.values()
            ]
            assert sorted(set(missed)) == [0, 2]


@distributed(world_size=(1, 2), timeout=120)
def test_state_lies_in_rows_as_shards_do_and_the_shards_stay_where_they_are(world: World) -> None:
    twins = Shadow(world, mesh_of(world, 0))
    platform = world.platform
    addresses = [platform.data_ptr(p.to_local()) for p in twins.parameters.values()]
    for step in range(2):
        twins.backward(step)
        twins.update()
    assert addresses == [platform.data_ptr(p.to_local()) for p in twins.parameters.values()]
    part = platform.narrow(platform.zeros((2,), "float32", world.device), 0, 0, 1)
    are_rows = platform.view_base(part) is not None and all(
        platform.supports(each, world.device) for each in ("alias", "write_into_view")
    )
    if not are_rows:  # it cannot be seen there that gradients lie in a row
        return
    # Two stacks, the layer between them, and the scalar, which lies in no row.
    assert twins.flat_rows() <= 4
    local = twins.optimizer.state[twins.model.first.layers[0].weight]["exp_avg"].to_local()
    assert platform.storage_nbytes(local) == platform.itemsize(local.dtype) * int(np.prod(tuple(local.shape)))


@distributed(world_size=(2, 4), timeout=120)
def test_a_step_communicates_nothing_but_the_pieces_of_replicas(world: World) -> None:
    twins = Shadow(world, mesh_of(world, 0))
    twins.backward(0)
    with count_collectives() as counted:
        twins.optimizer.step()
    counted.assert_counts()
    twins = Shadow(world, mesh_of(world, 2))
    twins.backward(0)
    with count_collectives() as counted:
        twins.optimizer.step()
    counted.assert_counts(all_gather=1)
    numel = 0
    for parameter in twins.parameters.values():
        local = tuple(parameter.to_local().shape)
        if local:
            numel += 2 * -(-local[0] // 2) * int(np.prod(local[1:]))
    assert counted.nbytes() == numel * world.platform.itemsize(world.platform.dtype(twins.dtype))


@distributed(world_size=(2, 4), timeout=240)
def test_accumulated_scaled_and_exchanged_gradients_count_as_they_are(world: World) -> None:
    platform = world.platform
    for replicas in (0, 2):
        twins = Shadow(world, mesh_of(world, replicas))
        for step in range(4):
            for micro in range(2):
                twins.model.set_requires_gradient_sync(micro == 1 or step % 2 == 0)
                twins.backward(10 * step + micro)
            if step == 1:
                for parameter in twins.parameters.values():
                    platform.mul_(parameter.grad.to_local(), 0.25)
            if step == 2:
                weight = twins.model.first.layers[1].weight
                weight.grad = weight.grad * 2
            twins.update()
            twins.check()


@distributed(world_size=(2, 4), timeout=240)
def test_shards_that_get_other_memory_and_parameters_that_are_frozen_count_as_they_are(world: World) -> None:
    platform = world.platform
    for replicas in (0, 2):
        twins = Shadow(world, mesh_of(world, replicas))
        weight = twins.model.second.layers[1].weight
        for step in range(6):
            if step == 3:
                weight.requires_grad_(False)
            if step == 5:
                weight.requires_grad_(True)
            twins.backward(step)
            if step == 1:  # after the row was read, and before anybody has looked at the shards again
                platform.set_data_(weight.to_local(), platform.clone(platform.detach(weight.to_local())) * 2)
                platform.mul_(twins.wholes["second.layers.1.weight"], 2.0)
            twins.update()
            twins.check()
        assert twins.optimizer.state[weight]["missed"] == 2


@distributed(world_size=(2, 4), timeout=240)
def test_gradients_of_bfloat16_shards_are_reduced_in_float32_and_state_is_as_wide_as_they_come(
    world: World,
) -> None:
    if not world.platform.supports("bfloat16_compute", world.device):
        return
    for replicas, keeps in ((0, True), (2, True), (0, False)):
        policy = MixedPrecisionPolicy(
            param_dtype="bfloat16", reduce_dtype="float32", apply_grad_on_fp32_main_grad=keeps
        )
        twins = Shadow(world, mesh_of(world, replicas), dtype="bfloat16", mp_policy=policy)
        for step in range(3):
            twins.backward(step, uses_extra=step != 1)
            twins.update()
            twins.check()
        weight = twins.model.first.layers[0].weight
        entry = twins.optimizer.state[weight]
        assert world.platform.dtype_name(entry["exp_avg"].dtype) == ("float32" if keeps else "bfloat16")
        assert world.platform.dtype_name(weight.dtype) == "bfloat16"


@distributed(world_size=(2, 4), timeout=240)
def test_main_grads_of_a_row_may_be_plain_pieces_or_lie_otherwise(world: World) -> None:
    platform = world.platform
    for replicas in (0, 2):
        twins = Shadow(world, mesh_of(world, replicas))
        for step in range(3):
            twins.backward(step, uses_extra=True)
            for name, parameter in twins.parameters.items():
                platform.set_grad(twins.wholes[name], platform.clone(twins.whole(parameter.grad)))
                gradient = parameter.grad
                parameter.main_grad = (
                    gradient.redistribute(placements=[Replicate()] * gradient.device_mesh.ndim)
                    if step == 1
                    else gradient.to_local()
                )
            twins.optimizer.step()
            twins.shadow.step()
            twins.optimizer.zero_grad()
            twins.shadow.zero_grad()
            twins.check()


@distributed(world_size=(1, 2, 4), timeout=240)
def test_offloaded_shards_are_updated_on_the_host(world: World) -> None:
    for replicas in [0] + [2] * (world.size > 1):
        twins = Shadow(world, mesh_of(world, replicas), offload_policy=CPUOffloadPolicy(pin_memory=False))
        for step in range(3):
            twins.backward(step, uses_extra=step != 1)
            twins.update()
            twins.check()
        entry = twins.optimizer.state[twins.model.first.layers[0].weight]
        assert world.platform.device_of(entry["exp_avg"].to_local()) == "cpu"


@distributed(world_size=(2, 3), timeout=240)
def test_whole_parameters_that_are_kept_are_gathered_anew_behind_a_step(world: World) -> None:
    """A write to a row counts for all of its shards, also on a rank whose own are empty."""
    for replicas in [0] + [2] * (world.size % 2 == 0):
        twins = Shadow(world, mesh_of(world, replicas), reshard_after_forward=False)
        other = Shadow(world, mesh_of(world, replicas))
        for each in (twins, other):
            each.model.set_reshard_after_backward(each is other)
            for step in range(3):
                each.backward(step)
                each.update()
                each.check()
        for a, b in zip(twins.parameters.values(), other.parameters.values(), strict=True):
            twins.equal(a, b)


@distributed(world_size=2, timeout=120)
def test_a_step_between_forward_and_backward_is_noticed(world: World) -> None:
    if not world.platform.supports("version_counter", world.device):
        return
    twins = Shadow(world, mesh_of(world, 0))
    twins.backward(0)
    late = twins.loss(1)
    twins.optimizer.step()
    try:
        world.platform.backward([late])
    except RuntimeError as error:
        assert "were written between a forward and its backward" in str(error)
    else:
        raise AssertionError("the step was not noticed")


@distributed(world_size=2, timeout=120)
def test_two_models_in_one_process_go_their_own_ways(world: World) -> None:
    first = Shadow(world, mesh_of(world, 0))
    second = Shadow(world, mesh_of(world, 2), seed=8)
    for step in range(3):
        for twins in (first, second) if step % 2 else (second, first):
            twins.backward(step)
            twins.update()
            twins.check()
    together = AdamW(
        [
            {"params": list(first.parameters.values())},
            {"params": list(second.parameters.values()), "lr": 0.0},
        ],
        fused=False,
    )
    kept = [twin.whole(p) for twin in (second,) for p in second.parameters.values()]
    for twins in (first, second):
        twins.backward(5)
    for group in together.param_groups:
        group["weight_decay"] = 0.0
    together.step()
    for before, parameter in zip(kept, second.parameters.values(), strict=True):
        second.equal(before, parameter)
    assert any(
        (
            world.platform.to_numpy(first.whole(p)) != world.platform.to_numpy(first.whole(first.wholes[n]))
        ).any()
        for n, p in first.parameters.items()
    )


def trained(world: World, mesh: Any, steps: int) -> tuple[Any, Any]:
    """One process' whole training on the samples of all ranks, and the sharded one."""
    platform, dtype = world.platform, widest(world)
    reference = make_model(world, dtype)
    sharded = Shadow(world, mesh)
    optimizer = AdamW(list(platform.named_parameters(reference)), lr=0.05, weight_decay=0.1, fused=False)
    for step in range(steps):
        losses = []
        for rank in range(world.size):
            random = np.random.default_rng(100 * step + rank)
            x = platform.tensor(random.uniform(-1, 1, (ROWS, 4)), dtype, world.device)
            output = reference(x)
            losses.append(platform.mean(output * output))
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        platform.backward([total / world.size])
        optimizer.step()
        optimizer.zero_grad()
        sharded.backward(step)
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
    return reference, sharded


@distributed(world_size=(1, 2, 3, 4), timeout=240)
def test_after_several_steps_parameters_equal_those_of_one_process(world: World) -> None:
    platform = world.platform
    # Gradients are summed in another order, which AdamW divides by their own size: units in the last place relative to a step of
    # lr, unless a gradient is near 0, where a step's direction is decided by rounding; none is here. Measured below 1e-14.
    atol = 1e-11 if widest(world) == "float64" else 2e-3
    for replicas in replica_counts(world):
        reference, sharded = trained(world, mesh_of(world, replicas), 5)
        for name, parameter in platform.named_parameters(reference):
            actual = platform.to_numpy(sharded.whole(sharded.parameters[name]))
            np.testing.assert_allclose(
                actual, platform.to_numpy(platform.detach(parameter)), rtol=0, atol=atol, err_msg=name
            )
