"""Other spellings of the same calls are taken here, and mean the same."""

from __future__ import annotations

from typing import Any

import pytest

import hyper_parallel
from hp_fsdp.unit import unit_of
from hp_platform.testing import World, assert_parity, count_collectives, distributed


def model_of(world: World) -> Any:
    platform = world.platform

    class Layer(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = platform.parameter(platform.full((4, 4), 0.5, "float32", world.device))

        def forward(self, x: Any) -> Any:
            return platform.linear(x, self.weight)

    class Model(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = platform.ModuleList([Layer() for _ in range(3)])

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    return Model()


def gradient_of(world: World, prepare: Any = None, **options: Any) -> Any:
    model = model_of(world)
    for layer in model.layers:
        hyper_parallel.fully_shard(layer, **options)
    hyper_parallel.fully_shard(model, **options)
    if prepare is not None:
        prepare(model)
    platform = world.platform
    for _ in range(2):
        model.zero_grad()
        platform.backward([platform.mean(model(platform.full((2, 4), 1.0, "float32", world.device)))])
    return platform.get_grad(model.layers[0].weight.to_local())


@distributed(world_size=2)
def test_every_spelling_of_an_argument_means_the_same(world: World) -> None:
    policy = hyper_parallel.MixedPrecisionPolicy(reduce_dtype="float32")
    expected = gradient_of(world, mp_policy=policy)
    assert_parity(gradient_of(world, mixed_precision=policy), expected, exact=True)
    assert_parity(gradient_of(world, overlap=False), expected, exact=True)
    doubled = gradient_of(world, lambda model: model.set_gradient_scaling_factor(scale_factor=2.0))
    assert_parity(doubled, expected * 2.0, exact=True)
    assert_parity(gradient_of(world, lambda m: m.set_gradient_scaling_factor(2.0)), doubled, exact=True)


def launched_before_layers(world: World, overlap: bool) -> list[int]:
    """How many all-gathers have been launched when each layer's forward begins, in a second pass."""
    platform, model = world.platform, model_of(world)
    for layer in model.layers:
        hyper_parallel.fully_shard(layer, overlap=overlap)
    hyper_parallel.fully_shard(model, overlap=overlap)
    x = platform.full((2, 4), 1.0, "float32", world.device)
    found: list[int] = []
    with platform.no_grad():
        model(x)  # the order is known from here on
        with count_collectives() as counted:
            for layer in model.layers:
                platform.register_forward_pre_hook(
                    layer, lambda *_: found.append(counted.counts.get("all_gather", 0))
                )
            model(x)
    return found


@distributed(world_size=2)
def test_without_overlap_nothing_is_gathered_ahead(world: World) -> None:
    assert launched_before_layers(world, overlap=True) == [2, 3, 3]
    assert launched_before_layers(world, overlap=False) == [1, 2, 3]


@distributed(world_size=1)
def test_two_spellings_at_once_are_refused(world: World) -> None:
    policy = hyper_parallel.MixedPrecisionPolicy()
    with pytest.raises(
        TypeError, match="fully_shard got mp_policy and mixed_precision, which are two names of one"
    ):
        hyper_parallel.fully_shard(model_of(world), mp_policy=policy, mixed_precision=policy)
    with pytest.raises(ValueError, match="overlap must be True or False, got 'no'"):
        hyper_parallel.fully_shard(model_of(world), overlap="no")
    model = hyper_parallel.fully_shard(model_of(world))
    with pytest.raises(TypeError, match="got factor and scale_factor"):
        model.set_gradient_scaling_factor(factor=1.0, scale_factor=1.0)


@distributed(world_size=1)
def test_a_list_of_modules_comes_back_sharded(world: World) -> None:
    model = model_of(world)
    layers = list(model.layers)
    assert hyper_parallel.fully_shard(layers, overlap=False) is layers
    assert len({id(unit_of(layer)) for layer in layers}) == 1
