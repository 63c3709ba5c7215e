"""Gradients of weights that are computed while the gradient of their input is on its way are the same, to the bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import Replicate, Shard
from hp_platform.recording import record_collectives
from hp_platform.testing import World, assert_parity, count_collectives, distributed
from hp_tp import ColwiseParallel, ModuleCuts, parallelize_module

sys.path.insert(0, str(Path(__file__).parent))
from put_off_layers import BACKENDS, FEATURES, assert_same_bits, both, gradients, input_of, layers_of, mixed
from style_layers import loss_of
from tp_models import Config, Maker, make_mesh, model_of, token_ids, tolerance
from tp_plans import model_plan
from tp_training import backward, cross_entropy, local


@pytest.mark.parametrize("sequence", [False, True], ids=["whole sequence", "cut sequence"])
@distributed(world_size=(1, 2, 4), backends=BACKENDS)
def test_a_models_bits_and_collectives_are_those_without_putting_off(world: World, sequence: bool) -> None:
    platform, config, mesh = world.platform, Config(), make_mesh(world)

    def step() -> tuple[list[Any], list[Any]]:
        plan = model_plan(config, world.size, sequence=sequence, use_local=not sequence)
        model = parallelize_module(model_of(world, config), mesh, plan)
        ids, targets = token_ids(world, config)
        with record_collectives() as forward:
            loss = cross_entropy(platform, model(ids), targets)
        with record_collectives() as back:
            backward(platform, loss)
        sent = [[(each.kind, each.nbytes) for each in record.launches] for record in (forward, back)]
        return [platform.to_numpy(loss), *gradients(world, model)], [sent[0], sorted(sent[1])]

    (expected, expected_sent), (found, sent) = both(step)
    assert_same_bits(found, expected)
    assert sent == expected_sent


def beside_another(world: World, layout: Any, layers: Any, x: Any) -> Any:
    """A module of one's own gets the same input."""
    platform, maker = world.platform, Maker(world, 11)

    class Scaled(platform.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = platform.parameter(maker.tensor(FEATURES * world.size, FEATURES))
            self.scale = platform.parameter(maker.tensor(FEATURES * world.size))

        def forward(self, x: Any) -> Any:
            return platform.linear(x, self.weight) * self.scale + platform.sum(x, -1, True)

    cuts = ModuleCuts({"weight": 0, "scale": 0})
    module = parallelize_module(Scaled(), make_mesh(world), ColwiseParallel(input_layouts=layout, cuts=cuts))
    return mixed(world, [layers[0], module, layers[1]], x)


def frozen(names: tuple[str, ...]) -> Callable[[World, Any, Any, Any], Any]:
    def use(world: World, layout: Any, layers: Any, x: Any) -> Any:
        for name in names:
            world.platform.set_requires_grad_(local(getattr(layers[1], name)), False)
        return mixed(world, layers, x)

    return use


def whose_gradient_others_read(world: World, layout: Any, layers: Any, x: Any) -> Any:
    """What the door gets back is also the gradient of something else, which looks at it later: it is not to be written to."""
    platform, maker = world.platform, Maker(world, 11)
    beside = x * 3 if layout == Replicate() else platform.cat([x * 3] * world.size, 1)

    class Module(platform.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.scale = platform.parameter(maker.tensor(FEATURES * world.size))

        def forward(self, x: Any) -> Any:
            return platform.sum((x + beside) * 2, -1, True) * self.scale

    cuts = ModuleCuts({"scale": 0})
    module = parallelize_module(Module(), make_mesh(world), ColwiseParallel(input_layouts=layout, cuts=cuts))
    return loss_of(world, module(x)) + mixed(world, layers, x * 2)


def tied(world: World, layout: Any, layers: Any, x: Any) -> Any:
    weight = world.platform.get_parameter(layers[0], "weight")
    world.platform.set_parameter(layers[2], "weight", weight)
    return mixed(world, layers, x)


USES: dict[str, Callable[[World, Any, Any, Any], Any]] = {
    "all": lambda world, layout, layers, x: mixed(world, layers, x),
    "one layer": lambda world, layout, layers, x: mixed(world, layers[:1], x),
    "one layer twice": lambda world, layout, layers, x: mixed(world, [layers[0], layers[1], layers[0]], x),
    "one weight in two layers": tied,
    "no weight": frozen(("weight",)),
    "no bias": frozen(("bias",)),
    "neither": frozen(("weight", "bias")),
    "input frozen": lambda world, layout, layers, x: mixed(world, layers, world.platform.detach(x)),
    "a computed input": lambda world, layout, layers, x: mixed(world, layers, x * 2),
    "two inputs": lambda world, layout, layers, x: mixed(world, layers, x) + mixed(world, layers[:2], x * 2),
    "rows": lambda world, layout, layers, x: mixed(world, layers, world.platform.transpose(x, 0, 1)),
    "another module": beside_another,
    "another module alone": whose_gradient_others_read,
}  # fmt: skip


@pytest.mark.parametrize("layout", [Replicate(), Shard(1)], ids=["whole", "cut"])
@pytest.mark.parametrize("use", USES)
@distributed(world_size=2, backends=BACKENDS)
def test_every_use_of_layers_gives_the_same_bits(world: World, use: str, layout: Any) -> None:
    """Twice on one graph, then the gradient of the input alone, then those of the weights alone."""
    platform, mesh = world.platform, make_mesh(world)

    def run() -> tuple[list[Any], dict[str, int]]:
        layers, x = layers_of(world, mesh, layout), input_of(world, layout)
        loss = USES[use](world, layout, layers, x)
        with count_collectives() as counted:
            for _ in range(2):
                platform.backward([loss], retain_graph=True)
        found = gradients(world, layers)
        if platform.get_grad(x) is not None:
            found.append(platform.to_numpy(platform.get_grad(x)))
            found.extend(platform.to_numpy(g) for g in platform.grad([loss], [x], retain_graph=True))
        weight = local(layers[0].weight)
        found.extend(platform.to_numpy(g) for g in platform.grad([loss], [weight]))
        return found, counted.counts

    (expected, expected_counts), (found, counts) = both(run)
    assert_same_bits(found, expected)
    assert counts == expected_counts


@pytest.mark.parametrize("layout", [Replicate(), Shard(1)], ids=["whole", "cut"])
@distributed(world_size=2, backends=BACKENDS)
def test_second_derivatives_are_those_without_putting_off(world: World, layout: Any) -> None:
    platform, mesh = world.platform, make_mesh(world)

    def run() -> dict[str, Any]:
        layers, x = layers_of(world, mesh, layout), input_of(world, layout)
        leaves = [x, *(local(p) for _, p in platform.named_parameters(layers))]
        first = platform.grad([mixed(world, layers, x)], leaves, create_graph=True)
        total = sum((g * g).sum() for g in first[1:]) + (first[0] * first[0]).sum()
        second = platform.grad([total], leaves)
        return {str(place): g for place, g in enumerate([*first, *second])}

    expected, found = both(run)
    size = max(float(abs(platform.to_numpy(g)).max()) for g in expected.values())
    scaled_up = {name: limit * max(1.0, size) for name, limit in tolerance(world).items()}
    assert_parity(found, expected, **scaled_up, name="gradients")
