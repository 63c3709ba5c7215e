"""Shards, gradients and optimizer states that wait on the host: the numbers of one process, and who lies where."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import DTensor, init_empty_weights, init_parameters, random
from hp_fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    StateDictOptions,
    fully_shard,
    get_model_state_dict,
    hsdp_sync_stream,
    set_model_state_dict,
)
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import PROGRAMS, Maker, check_three_steps, local, loss_of, make_mesh, numpy_of
from test_course import Twins

OFFLOAD = CPUOffloadPolicy()


def devices(world: World, model: Any, value: Any = lambda x: x) -> set[str]:
    """Where ``value(shard)`` of all parameters lies."""
    found = [value(local(p)) for _, p in world.platform.named_parameters(model)]
    return {world.platform.device_of(x) for x in found if x is not None}


@pytest.mark.parametrize("name", list(PROGRAMS))
@distributed(world_size=(1, 2, 3))
def test_training_with_offloaded_shards_equals_training_in_one_process(world: World, name: str) -> None:
    check_three_steps(world, PROGRAMS[name], offload_policy=OFFLOAD)


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"comm_fusion": False},
        {"comm_fusion_zero_copy": False},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    ],
)
@distributed(world_size=2)
def test_so_it_does_under_other_options(world: World, options: dict[str, Any]) -> None:
    for name in ("mlp", "branches", "scalars"):
        check_three_steps(world, PROGRAMS[name], **{"offload_policy": OFFLOAD, **options})


@pytest.mark.parametrize("policy", [None, OFFLOAD], ids=["on the device", "offloaded"])
@distributed(world_size=4, min_world_size=4, backends=("torch", "cuda", "npu"))
def test_so_it_does_on_meshes_that_replicate(world: World, policy: CPUOffloadPolicy | None) -> None:
    """What follows a reduce-scatter has a stream of its own where there are streams."""
    for replicas, name in ((2, "mlp"), (2, "branches"), (4, "scalars")):
        check_three_steps(world, PROGRAMS[name], replicas=replicas, offload_policy=policy)


@distributed(world_size=2)
def test_shards_and_gradients_lie_on_the_host_and_whole_parameters_on_the_device(world: World) -> None:
    twins, platform = Twins(world, "scalars", offload_policy=OFFLOAD), world.platform
    seen = set()

    def look(module: Any, args: Any, kwargs: Any) -> None:
        seen.update(platform.device_of(x) for x in (module.weight, module.bias))

    platform.register_forward_pre_hook(platform.get_submodule(twins.sharded, "part.inner"), look)
    twins.backward(twins.loss(0))
    assert seen == {world.device}
    assert devices(world, twins.sharded) == {"cpu"}
    assert devices(world, twins.sharded, platform.get_grad) == {"cpu"}
    for _, parameter in platform.named_parameters(twins.sharded):
        assert isinstance(parameter, DTensor)
        assert parameter.device_mesh.device_type == world.device_type


@pytest.mark.parametrize("name", ["mlp", "branches", "scalars"])
@distributed(world_size=2)
def test_gradients_of_several_backwards_add_up_on_the_host(world: World, name: str) -> None:
    twins = Twins(world, name, offload_policy=OFFLOAD)
    for batch in range(3):
        twins.backward(twins.loss(batch))
        twins.backward(twins.reference_loss(batch))
    twins.check()


@distributed(world_size=2)
def test_the_host_waits_for_sums_that_the_device_does_nothing_more_with(world: World) -> None:
    """Where a mean is a division behind the sum, an emulated device has waited already."""
    twins, platform = Twins(world, offload_policy=OFFLOAD), world.platform
    twins.sharded.set_reduce_op_type("sum")
    for batch in range(2):
        twins.backward(twins.loss(batch))
        twins.backward(twins.reference_loss(batch) * world.size)
    twins.check()
    assert platform.get_grad(local(twins.sharded.head.weight)) is not None


@distributed(world_size=2)
def test_without_synchronisation_gradients_wait_on_the_device(world: World) -> None:
    twins, platform = Twins(world, offload_policy=OFFLOAD), world.platform
    for batch in range(3):
        twins.sharded.set_requires_gradient_sync(batch == 2)
        twins.backward(twins.loss(batch))
        twins.backward(twins.reference_loss(batch))
        if batch < 2:
            assert devices(world, twins.sharded, platform.get_grad) == set()
    twins.check()


@distributed(world_size=2)
def test_gradients_come_when_somebody_waits_for_the_last_backward(world: World) -> None:
    twins = Twins(world, offload_policy=OFFLOAD)
    twins.sharded.set_is_last_backward(False)
    for batch in range(2):
        twins.backward(twins.loss(batch))
        twins.backward(twins.reference_loss(batch))
    hsdp_sync_stream()
    twins.check()


@distributed(world_size=2)
def test_what_is_written_to_shards_counts_from_the_next_forward_on(world: World) -> None:
    twins, platform = Twins(world, offload_policy=OFFLOAD), world.platform
    values = numpy_of(platform, twins.reference, platform.detach)
    for step in range(3):
        inputs = twins.program.inputs(Maker(world), world.rank, step)
        with platform.no_grad():
            output = twins.sharded(inputs)
            for _, parameter in platform.named_parameters(twins.sharded):
                platform.mul_(local(parameter), 0.5)  # at once: the forward before must not see it
            assert_parity(output, twins.reference(inputs), rtol=0, atol=1e-5)
        for name, parameter in platform.named_parameters(twins.reference):
            values[name] = values[name] * 0.5
            platform.copy_(parameter, platform.tensor(values[name], Maker(world).dtype, world.device))
    twins.check("parameters")


@distributed(world_size=2)
def test_offloading_changes_no_collective(world: World) -> None:
    counts = []
    for policy in (None, OFFLOAD):
        twins = Twins(world, offload_policy=policy)
        with count_collectives() as counted:
            twins.backward(twins.loss(0))
        counts.append(counted)
    counts[1].assert_counts(all_gather=5, reduce_scatter=3)
    for kind in ("all_gather", "reduce_scatter"):
        assert counts[0].nbytes(kind) == counts[1].nbytes(kind)


@distributed(world_size=2)
def test_main_gradients_lie_on_the_host_in_the_dtype_of_the_reduction(world: World) -> None:
    platform = world.platform
    low = "bfloat16" if platform.supports("bfloat16_compute", world.device) else "float16"
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype="float32", apply_grad_on_fp32_main_grad=True)
    maker = Maker(world, low)
    model = fully_shard(
        PROGRAMS["mlp"].build(maker), make_mesh(world), mp_policy=policy, offload_policy=OFFLOAD
    )
    for _ in range(2):
        x = PROGRAMS["mlp"].inputs(maker, world.rank, 0)
        platform.backward([loss_of(platform, platform.cast(model(x), "float32"))])
    for _, parameter in platform.named_parameters(model):
        assert platform.get_grad(parameter) is None
        assert isinstance(parameter.main_grad, DTensor)
        assert platform.dtype_name(parameter.main_grad.dtype) == "float32"
        assert platform.device_of(parameter.main_grad.to_local()) == "cpu"


@distributed(world_size=2)
def test_states_of_offloaded_models_go_out_and_in(world: World) -> None:
    twins, platform = Twins(world, "tied", offload_policy=OFFLOAD), world.platform
    full = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(twins.sharded, options=full)
    names = dict(platform.named_parameters(twins.reference))
    assert_parity({n: state[n] for n in names}, {n: platform.detach(p) for n, p in names.items()}, exact=True)
    new = {name: platform.zeros_like(x) for name, x in state.items()}
    assert set_model_state_dict(twins.sharded, new) == ([], [])
    assert devices(world, twins.sharded) == {"cpu"}
    with platform.no_grad():
        output = twins.sharded(twins.program.inputs(Maker(world), world.rank, 0))
    assert not platform.to_numpy(output).any()


@distributed(world_size=2)
def test_replicated_parameters_are_offloaded_too(world: World) -> None:
    platform = world.platform

    def build() -> Any:
        return PROGRAMS["mlp"].build(Maker(world))

    model, reference = build(), build()
    fully_shard(
        model, make_mesh(world), offload_policy=OFFLOAD, replicate_params=[model.head.weight, model.head.bias]
    )
    assert tuple(local(model.head.weight).shape) == (3, 4)
    assert devices(world, model) == {"cpu"}
    inputs = PROGRAMS["mlp"].inputs(Maker(world), 0, 0)  # the same on all ranks
    for _ in range(2):
        for each in (reference, model):
            platform.backward([loss_of(platform, each(inputs))])
    for get in (platform.get_grad, platform.detach):
        assert_parity(
            get(local(model.head.weight)),
            platform.to_device(get(reference.head.weight), "cpu"),
            rtol=0,
            atol=1e-6,
        )
    assert devices(world, model, platform.get_grad) == {"cpu"}


@pytest.mark.parametrize("how", ["init_parameters", "set_model_state_dict"])
@distributed(world_size=2)
def test_offloaded_models_are_initialised_from_the_meta_device_on_the_host(world: World, how: str) -> None:
    platform, mesh = world.platform, make_mesh(world)

    def build() -> Any:
        maker = Maker(world)

        class Drawn(platform.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = maker.parameter(5, 4)
                self.scale = maker.parameter()

            def reset_parameters(self) -> None:
                random.normal_(self.weight, 0.0, 0.5)
                random.uniform_(self.scale, 1.0, 2.0)

            def forward(self, x: Any) -> Any:
                return platform.linear(x, self.weight) * self.scale

        with init_empty_weights():
            return Drawn()

    reference = build()
    random.manual_seed(5)
    init_parameters(reference, device=world.device)
    model = fully_shard(build(), mesh, offload_policy=OFFLOAD)
    random.manual_seed(5)
    init_parameters(model)
    if how == "set_model_state_dict":
        values = {name: platform.detach(p) * 2 for name, p in platform.named_parameters(reference)}
        set_model_state_dict(model, values)
        for name, parameter in platform.named_parameters(reference):
            platform.copy_(parameter, values[name])
    assert devices(world, model) == {"cpu"}
    x = platform.full((2, 4), 0.5, Maker(world).dtype, world.device)
    for each in (reference, model):
        platform.backward([loss_of(platform, each(x))])
    assert devices(world, model, platform.get_grad) == {"cpu"}
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert_parity(full, numpy_of(platform, reference, platform.detach), exact=True)
    assert_parity(
        platform.get_grad(local(model.scale)),
        platform.to_device(platform.get_grad(reference.scale), "cpu"),
        rtol=0,
        atol=1e-6,
    )


@distributed(world_size=2)
def test_moving_offloaded_parameters_to_the_device_is_refused_with_their_names(world: World) -> None:
    platform = world.platform
    twins = Twins(world, offload_policy=OFFLOAD)
    if world.device_type == "cpu":  # nothing is offloaded, and nothing can be moved
        assert devices(world, twins.sharded) == {"cpu"}
        twins.backward(twins.loss(0))
        return
    for name in ("head.weight", "head.bias"):
        shard = local(dict(platform.named_parameters(twins.sharded))[name])
        platform.set_data_(shard, platform.to_device(platform.detach(shard), world.device))
    with pytest.raises(RuntimeError, match=r"keeps them on the cpu: 'head.weight', 'head.bias'; leave out"):
        twins.loss(0)
