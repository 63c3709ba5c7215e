"""Parameters with an extension: what it makes of the pieces is gathered, and the whole parameter is what it makes of that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import Shard
from hp_dtensor.chunk import chunk_length
from hp_fsdp import fully_shard
from hp_fsdp.unit import units_in
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import (
    PROGRAMS,
    Maker,
    dtype_of,
    local,
    loss_of,
    make_mesh,
    numpy_of,
    reference_gradients,
    sgd_step,
    tolerance,
    whole,
)


class Narrow:
    """Travels as float16. The whole parameter is in memory of its own, or (``keeps``) stays as it has come."""

    def __init__(self, platform: Any) -> None:
        self.platform = platform
        self.calls: list[tuple[str, Any]] = []

    def fsdp_pre_all_gather(self, shard: Any, mesh: Any) -> tuple[tuple[Any, ...], Any]:
        self.calls.append(("pre", tuple(shard.shape)))
        return (self.platform.cast(shard, "float16"),), mesh.shape

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        assert metadata[-1] >= 1
        self.calls.append(("post" if out is None else "again", tuple(outputs[0].shape)))
        if out is not None:
            self.platform.copy_(out, outputs[0])
            return None
        made = self.platform.cast(outputs[0], dtype)
        return made, (made,)


class AsItCame:
    """Two halves along dim 1 travel each by itself, in the dtype that it has; the first is kept as the whole parameter."""

    def __init__(self, platform: Any) -> None:
        self.platform = platform

    def fsdp_pre_all_gather(self, shard: Any, mesh: Any) -> tuple[list[Any], None]:
        return [shard, self.platform.full((1,), 1.0, "float32", self.platform.device_of(shard))], None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], (outputs[0],))


def rounded(platform: Any, model: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Let the model compute with float16's values, and give back what it had."""
    kept = {}
    for name, parameter in platform.named_parameters(model):
        if name in names:
            kept[name] = platform.clone(platform.detach(parameter))
            platform.copy_(parameter, platform.cast(platform.cast(kept[name], "float16"), parameter.dtype))
    return kept


NAMES = ("blocks.0.inner.weight", "blocks.1.outer.weight", "head.weight")


@pytest.mark.parametrize("kind", ["narrow", "as it came"])
@distributed(world_size=(1, 2, 3))
def test_training_is_that_of_one_process_with_the_values_that_the_extension_gives(
    world: World, kind: str
) -> None:
    platform, program, mesh = world.platform, PROGRAMS["mlp"], make_mesh(world)
    reference, model = program.build(Maker(world)), program.build(Maker(world))
    shapes = {n: tuple(p.shape) for n, p in platform.named_parameters(reference)}
    extensions = {}
    for name, parameter in platform.named_parameters(model):
        if name in NAMES:
            extensions[name] = Narrow(platform) if kind == "narrow" else AsItCame(platform)
            parameter._hp_fsdp_extension = extensions[name]
    program.shard(model, mesh)
    for step in range(3):
        maker = Maker(world)
        kept = rounded(platform, reference, NAMES) if kind == "narrow" else {}
        outputs = reference_gradients(program, maker, reference, world.size, step)
        with platform.no_grad():
            for name, parameter in platform.named_parameters(reference):
                if name in kept:
                    platform.copy_(parameter, kept[name])
        output = model(program.inputs(maker, world.rank, step))
        assert_parity(output, outputs[world.rank], **tolerance(world))
        for unit in units_in(platform, model):
            for param in unit.params:
                held = platform.storage_nbytes(param.full) if param.is_extended else 0
                assert bool(held) == (param.is_extended and unit.label == "Model"), "the root keeps its own"
        platform.backward([loss_of(platform, output)])
        assert_parity(
            whole(world, model, shapes, mesh, platform.get_grad),
            numpy_of(platform, reference, platform.get_grad),
            **tolerance(world),
        )
        with platform.no_grad():
            model(program.inputs(maker, world.rank, step))
        sgd_step(platform, reference)
        sgd_step(platform, model)
    if kind == "narrow":
        rows = chunk_length(5, world.size)
        calls = extensions["blocks.0.inner.weight"].calls  # 5 x 4
        assert calls[:4] == [("pre", (rows, 4)), ("post", (5, 4)), ("pre", (rows, 4)), ("again", (5, 4))]
        assert len(calls) == 2 * (3 * 3), "forward, backward and evaluation of three steps"


@distributed(world_size=2)
def test_what_travels_is_what_the_extension_gives(world: World) -> None:
    platform = world.platform
    maker = Maker(world)
    model = maker.linear(6, 50)
    fully_shard(model, make_mesh(world))
    with count_collectives() as plain, platform.no_grad():
        model(platform.zeros((1, 50), maker.dtype, world.device))
    model = maker.linear(6, 50)
    model.weight._hp_fsdp_extension = Narrow(platform)
    fully_shard(model, make_mesh(world))
    with count_collectives() as counted, platform.no_grad():
        model(platform.zeros((1, 50), maker.dtype, world.device))
    plain.assert_counts(all_gather=1)
    counted.assert_counts(all_gather=2)
    itemsize = platform.itemsize(dtype_of(world))
    assert plain.nbytes("all_gather") == (300 + 6) * itemsize
    assert counted.nbytes("all_gather") == 300 * 2 + 6 * itemsize
    assert tuple(local(model.weight).shape) == (3, 50)


class Half:
    def fsdp_pre_all_gather(self, shard: Any, mesh: Any) -> Any:
        return (shard,), None


class Wrong(AsItCame):
    """Gives something else at one of its hooks."""

    def __init__(self, platform: Any, pre: Any = None, post: Any = None) -> None:
        super().__init__(platform)
        self.pre, self.post = pre, post

    def fsdp_pre_all_gather(self, shard: Any, mesh: Any) -> Any:
        return super().fsdp_pre_all_gather(shard, mesh) if self.pre is None else self.pre(shard)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return (
            super().fsdp_post_all_gather(outputs, metadata, dtype, out=out)
            if self.post is None
            else self.post(outputs)
        )


CALLS: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "fused": (
        AsItCame,
        {"comm_fusion": True},
        "comm_fusion=True is not possible with parameter 'weight', which has an extension",
    ),
    "another dim": (
        AsItCame,
        {"shard_placement_fn": lambda p: Shard(len(p.shape) - 1)},
        "parameter 'weight' has an extension and is sharded along dim 1: what an extension gives is gathered along dim 0",
    ),
    "one hook": (lambda platform: Half(), {}, "Half must have fsdp_pre_all_gather and fsdp_post_all_gather"),
    "no pair": (
        lambda platform: Wrong(platform, pre=lambda shard: shard),
        {},
        r"fsdp_pre_all_gather of parameter 'weight' must return \(tensors, metadata\)",
    ),
    "nothing to gather": (
        lambda platform: Wrong(platform, pre=lambda shard: ((), None)),
        {},
        "with at least one tensor",
    ),
    "another shape": (
        lambda platform: Wrong(platform, post=lambda outputs: (outputs[1], (outputs[1],))),
        {},
        r"fsdp_post_all_gather of parameter 'weight' must return .* of shape \(6, 4\)",
    ),
}


@pytest.mark.parametrize("call", list(CALLS))
@distributed(world_size=2)
def test_an_extension_that_does_not_fit_is_refused(world: World, call: str) -> None:
    make, options, message = CALLS[call]
    maker = Maker(world)
    model = maker.linear(6, 4)
    model.weight._hp_fsdp_extension = make(world.platform)
    with pytest.raises(ValueError, match=message):
        fully_shard(model, make_mesh(world), **options)(
            world.platform.zeros((1, 4), maker.dtype, world.device)
        )


@distributed(world_size=2)
def test_a_replicated_parameter_with_an_extension_is_refused(world: World) -> None:
    model = Maker(world).linear(6, 4)
    model.weight._hp_fsdp_extension = AsItCame(world.platform)
    with pytest.raises(ValueError, match="parameter 'weight' has an extension and is replicated"):
        fully_shard(model, make_mesh(world), replicate_params=[model.weight])


@distributed(world_size=2)
def test_other_shapes_than_before_are_refused(world: World) -> None:
    platform, maker = world.platform, Maker(world)
    model = maker.linear(6, 4)
    widths = iter([4, 3])
    model.weight._hp_fsdp_extension = Wrong(
        platform,
        pre=lambda shard: ((platform.narrow(shard, 1, 0, next(widths)),), None),
    )
    fully_shard(model, make_mesh(world))
    inputs = platform.zeros((1, 4), maker.dtype, world.device)
    with platform.no_grad():
        model(inputs)
        with pytest.raises(
            RuntimeError, match="of parameter 'weight' gave other shapes or dtypes than before"
        ):
            model(inputs)
