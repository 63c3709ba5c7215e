"""Which dtype stands where under a policy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import ROWS, Maker, loss_of, make_mesh, numpy_of, whole


def low(world: World) -> str:
    """The low precision in which the device computes."""
    return "bfloat16" if world.platform.supports("bfloat16_compute", world.device) else "float16"


class Seen:
    """A linear layer that notes dtypes while it runs."""

    def __init__(self, world: World, maker: Maker) -> None:
        platform, seen = world.platform, self
        self.dtypes: dict[str, str] = {}

        class Spy(platform.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = maker.parameter(4, 4)
                self.scale = maker.parameter()

            def forward(self, x: Any, table: Any) -> Any:
                seen.dtypes = {
                    "input": platform.dtype_name(x["x"].dtype),
                    "table": platform.dtype_name(table.dtype),
                    "weight": platform.dtype_name(self.weight.dtype),
                    "scale": platform.dtype_name(self.scale.dtype),
                }
                return platform.linear(x["x"], platform.cast(self.weight, x["x"].dtype)) * platform.cast(
                    self.scale, x["x"].dtype
                )

        self.module = Spy()


def run(world: World, policy: MixedPrecisionPolicy) -> tuple[Seen, Any]:
    platform = world.platform
    maker = Maker(world, "float32")
    seen = Seen(world, maker)
    fully_shard(seen.module, make_mesh(world), mp_policy=policy)
    x = platform.full((ROWS, 4), 0.5, "float32", world.device)
    return seen, seen.module({"x": x}, table=platform.arange(0, 3, "int64", world.device))


@distributed(world_size=2)
def test_parameters_and_inputs_are_computed_with_in_param_dtype(world: World) -> None:
    name = low(world)
    seen, output = run(world, MixedPrecisionPolicy(param_dtype=name))
    assert seen.dtypes == {"input": name, "table": "int64", "weight": name, "scale": name}
    assert world.platform.dtype_name(output.dtype) == name
    dtypes = {world.platform.dtype_name(p.dtype) for _, p in world.platform.named_parameters(seen.module)}
    assert dtypes == {"float32"}, "shards keep the original dtype"


@distributed(world_size=2)
def test_inputs_stay_as_they_are_without_cast_forward_inputs(world: World) -> None:
    name = low(world)
    policy = MixedPrecisionPolicy(param_dtype=world.platform.dtype(name), cast_forward_inputs=False)
    seen, _ = run(world, policy)
    assert seen.dtypes == {"input": "float32", "table": "int64", "weight": name, "scale": name}


@distributed(world_size=2)
def test_outputs_come_in_output_dtype(world: World) -> None:
    _, output = run(world, MixedPrecisionPolicy(param_dtype=low(world), output_dtype="float32"))
    assert world.platform.dtype_name(output.dtype) == "float32"


@pytest.mark.parametrize("reduce_dtype", [None, "float32"])
@distributed(world_size=2)
def test_gradients_travel_as_they_were_computed_and_arrive_in_the_original_dtype(
    world: World, reduce_dtype: str | None
) -> None:
    platform = world.platform
    seen, output = run(world, MixedPrecisionPolicy(param_dtype=low(world), reduce_dtype=reduce_dtype))
    with count_collectives() as counted:
        platform.backward([loss_of(platform, output)])
    # Two lines of half the weight, the scalar, and two numbers for use.
    numel = 2 * (8 + 1 + 2)
    if reduce_dtype is None:
        assert counted.nbytes("reduce_scatter") == numel * 2
    elif platform.supports("exchange", world.device):
        counted.assert_counts(all_to_all=1)
        assert counted.nbytes("all_to_all") == numel * 2, "widened where they are added up, not before"
    else:
        assert counted.nbytes("reduce_scatter") == numel * 4
    for _, parameter in platform.named_parameters(seen.module):
        assert platform.dtype_name(platform.get_grad(parameter).dtype) == "float32"


@distributed(world_size=2)
def test_reducing_in_float32_loses_nothing_that_low_precision_would(world: World) -> None:
    """Rank 0's gradient is 1, rank 1's 2**-12 of it: the sum needs 13 bits, more than float16 (11) or bfloat16 (8) hold."""
    platform = world.platform
    for reduce_dtype, expected in (("float32", (1 + 2**-12) / 2), (None, 0.5)):
        maker = Maker(world, "float32")
        model = maker.model(
            lambda module, maker=maker: setattr(module, "weight", maker.parameter(4)),
            lambda module, x, rank: module.weight * x,
        )
        policy = MixedPrecisionPolicy(param_dtype=low(world), reduce_dtype=reduce_dtype)
        mesh = make_mesh(world)
        fully_shard(model, mesh, mp_policy=policy)
        x = platform.full((4,), 1.0 if world.rank == 0 else 2.0**-12, "float32", world.device)
        platform.backward([platform.sum(model(x))])
        gradient = whole(world, model, {"weight": (4,)}, mesh, platform.get_grad)["weight"]
        assert_parity(gradient, platform.to_numpy(platform.full((4,), expected, "float32")), exact=True)


@distributed(world_size=(1, 2))
def test_a_rank_that_leaves_a_backward_without_synchronisation_out_sends_as_the_others_do(
    world: World,
) -> None:
    platform = world.platform
    maker = Maker(world, "float32")
    model = maker.model(
        lambda module: setattr(module, "weight", maker.parameter(4)),
        lambda module, x, rank: module.weight * x,
    )
    mesh = make_mesh(world)
    policy = MixedPrecisionPolicy(param_dtype=low(world), reduce_dtype="float32")
    fully_shard(model, mesh, mp_policy=policy)
    x = platform.full((4,), 1.0, "float32", world.device)
    model.set_requires_gradient_sync(False)
    output = model(x)
    if world.rank == 0:  # the others find that there is nothing to learn
        platform.backward([platform.sum(output)])
    model.set_requires_gradient_sync(True)
    for num_backwards in (2, 1):
        expected = (num_backwards + world.size - 1) / world.size
        platform.backward([platform.sum(model(x))])
        gradient = whole(world, model, {"weight": (4,)}, mesh, platform.get_grad)["weight"]
        assert_parity(gradient, platform.to_numpy(platform.full((4,), expected, "float32")), exact=True)
        model.zero_grad()


@distributed(world_size=2)
def test_a_unit_may_hold_several_dtypes(world: World) -> None:
    platform = world.platform
    name = low(world)

    def build() -> Any:
        half, full = Maker(world, name), Maker(world, "float32")

        def setup(module: Any) -> None:
            module.body = half.parameter(5, 4)
            module.norm = full.parameter(4)

        def forward(module: Any, x: Any, rank: int) -> Any:
            x = platform.cast(platform.cast(x, "float32") * module.norm, name)
            return platform.cast(platform.linear(x, module.body), "float32")

        return full.model(setup, forward)

    mesh = make_mesh(world)
    reference, model = build(), fully_shard(build(), mesh)
    x = platform.tensor([[0.5, -1.0, 0.25, 2.0]], "float32", world.device)
    with count_collectives() as counted:
        for each in (reference, model):
            platform.backward([loss_of(platform, each(x))])
    counted.assert_counts(all_gather=2, reduce_scatter=2)
    shapes = {"body": (5, 4), "norm": (4,)}
    # Both ranks see the same, so the mean of two equal numbers is exact in every dtype.
    assert_parity(
        whole(world, model, shapes, mesh, platform.get_grad),
        numpy_of(platform, reference, platform.get_grad),
        exact=True,
    )
    # With one reduce dtype they travel together.
    model = fully_shard(build(), mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype="float32"))
    with count_collectives() as counted:
        platform.backward([loss_of(platform, model(x))])
    counted.assert_counts(all_gather=2, reduce_scatter=1)
    dtypes = {platform.dtype_name(platform.get_grad(p).dtype) for _, p in platform.named_parameters(model)}
    assert dtypes == {name, "float32"}
