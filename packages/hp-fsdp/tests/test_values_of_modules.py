"""What modules take and return, keep and ignore when they are units."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import DTensor
from hp_fsdp import HSDPModule, fully_shard
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import (
    PROGRAMS,
    Maker,
    local,
    loss_of,
    make_mesh,
    numpy_of,
    tolerance,
    whole,
)


@dataclass
class Answer:
    value: Any
    extra: dict[str, Any]


class Closed:
    """Of an unknown class: nobody can look inside."""

    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize("kind", ["dataclass", "dict", "tuple", "closed", "keywords"])
@distributed(world_size=2)
def test_units_take_and_return_nested_values(world: World, kind: str) -> None:
    platform = world.platform
    wrap = {
        "dataclass": lambda x: Answer(x, {"twice": x * 2}),
        "dict": lambda x: {"value": x, "list": [x * 2]},
        "tuple": lambda x: (x, None, (x * 2,)),
        "closed": Closed,
        "keywords": lambda x: x,
    }[kind]
    unwrap = {
        "dataclass": lambda y: y.value + y.extra["twice"],
        "dict": lambda y: y["value"] + y["list"][0],
        "tuple": lambda y: y[0] + y[2][0],
        "closed": lambda y: y.value,
        "keywords": lambda y: y,
    }[kind]

    def build() -> Any:
        maker = Maker(world)

        class Inner(platform.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = maker.linear(4, 4)

            def forward(self, boxed: Any, *, bias: Any) -> Any:
                return wrap(self.linear(boxed["x"]) + bias)

        def setup(module: Any) -> None:
            module.before = maker.linear(4, 4)
            module.inner = Inner()
            module.after = maker.linear(4, 4)

        def forward(module: Any, x: Any, rank: int) -> Any:
            x = module.before(x)
            return module.after(unwrap(module.inner({"x": x, "n": 3}, bias=x)))

        return maker.model(setup, forward)

    reference, model = build(), build()
    shapes = {n: tuple(p.shape) for n, p in platform.named_parameters(reference)}
    mesh = make_mesh(world)
    fully_shard(model.inner, mesh)
    fully_shard(model, mesh)
    inputs = PROGRAMS["mlp"].inputs(Maker(world), 0, 0)  # the same on all ranks
    for each in (reference, model):
        platform.backward([loss_of(platform, each(inputs))])
    assert_parity(
        whole(world, model, shapes, mesh, platform.get_grad),
        numpy_of(platform, reference, platform.get_grad),
        **tolerance(world),
    )
    assert tuple(local(model.inner.linear.weight).shape) == (2, 4)


@distributed(world_size=2)
def test_modules_keep_their_class_and_parameters_their_names_and_ties(world: World) -> None:
    platform = world.platform
    model = PROGRAMS["tied"].build(Maker(world))
    cls, before = type(model), dict(platform.named_parameters(model))
    PROGRAMS["tied"].shard(model, make_mesh(world))
    assert isinstance(model, cls)
    assert isinstance(model, HSDPModule)
    assert type(model).__name__ == "HSDP" + cls.__name__
    after = dict(platform.named_parameters(model))
    assert list(after) == list(before)
    for name, parameter in after.items():
        assert isinstance(parameter, DTensor)
        assert platform.is_parameter(parameter)
        assert tuple(parameter.shape) == tuple(before[name].shape)
    assert model.head.weight is model.embed.weight
    assert tuple(local(model.head.weight).shape) == ((3, 4) if world.rank == 0 else (2, 4))


@distributed(world_size=2)
def test_ignored_parameters_stay_whole_and_are_not_averaged(world: World) -> None:
    platform = world.platform
    model = PROGRAMS["mlp"].build(Maker(world))
    kept = model.head.weight
    fully_shard(model, make_mesh(world), ignored_params=[kept])
    assert tuple(model.head.weight.shape) == (3, 4)
    inputs = PROGRAMS["mlp"].inputs(Maker(world), world.rank, 0)
    platform.backward([loss_of(platform, model(inputs))])
    reference = PROGRAMS["mlp"].build(Maker(world))
    platform.backward([loss_of(platform, reference(inputs))])
    assert_parity(platform.get_grad(kept), platform.get_grad(reference.head.weight), **tolerance(world))
