"""Modules that checkpoint themselves stay what they are, and parts of them may run once."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from hp_platform.testing import World, distributed
from hp_recompute import CheckpointError, checkpoint, checkpoint_exclude_wrapper, checkpoint_wrapper


def make_model(world: World, calls: list[str]) -> Any:
    """Two blocks of two layers; every layer notes its name when it runs."""
    platform, random = world.platform, np.random.default_rng(0)
    dtype = "float64" if platform.supports("float64_compute", world.device) else "float32"

    class Layer(platform.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.note = name
            values = platform.tensor(random.uniform(-1, 1, (4, 4)), dtype, world.device)
            self.weight = platform.parameter(values)

        def forward(self, x: Any) -> Any:
            calls.append(self.note)
            return platform.gelu(platform.matmul(platform.sin(x), self.weight))

    class Block(platform.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.first, self.second = Layer(name + ".first"), Layer(name + ".second")

        def forward(self, x: Any, *, scale: float = 1.0) -> Any:
            return platform.sin(self.second(self.first(x)) * scale) + x

    class Model(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = platform.ModuleList([Block("0"), Block("1")])

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x, scale=0.5)
            return x

    return Model()


def gradients(world: World, model: Any) -> list[Any]:
    platform = world.platform
    dtype = next(parameter for _, parameter in platform.named_parameters(model)).dtype
    x = platform.set_requires_grad_(
        platform.tensor(np.linspace(-1, 1, 12).reshape(3, 4), dtype, world.device), True
    )
    y = model(x)
    platform.backward([platform.sum(y * y)])
    found = [x, *(parameter for _, parameter in platform.named_parameters(model))]
    return [platform.to_numpy(platform.get_grad(each)) for each in found]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@distributed(world_size=1)
def test_a_wrapped_module_is_the_same_object_and_gives_the_same_numbers(world: World) -> None:
    platform = world.platform
    plain, calls = make_model(world, []), []
    model = make_model(world, calls)
    names = list(platform.state_dict(model))
    for block in model.blocks:
        kind = type(block).__name__
        assert checkpoint_wrapper(block) is block
        assert type(block).__name__ == kind
    assert list(platform.state_dict(model)) == names
    expected = gradients(world, plain)
    assert_equal(gradients(world, model), expected)
    assert calls == ["0.first", "0.second", "1.first", "1.second"] + [
        "1.first",
        "1.second",
        "0.first",
        "0.second",
    ]
    assert_equal(gradients(world, copy.deepcopy(make_wrapped(world))), expected)


def make_wrapped(world: World) -> Any:
    model = make_model(world, [])
    for block in model.blocks:
        checkpoint_wrapper(block)
    return model


@distributed(world_size=1)
def test_a_part_that_is_excluded_runs_once(world: World) -> None:
    for number, (part, again) in enumerate({"first": ["second"], "second": ["first"]}.items()):
        calls: list[str] = []
        model = make_model(world, calls)
        checkpoint_wrapper(model.blocks[1])
        assert checkpoint_exclude_wrapper(getattr(model.blocks[1], part)) is getattr(model.blocks[1], part)
        assert_equal(gradients(world, model), gradients(world, make_model(world, [])))
        assert calls[4:] == [f"1.{name}" for name in again], number


@distributed(world_size=1)
def test_a_part_that_is_excluded_runs_once_in_checkpoints_of_checkpoints_too(world: World) -> None:
    calls: list[str] = []
    model = make_model(world, calls)
    checkpoint_exclude_wrapper(model.blocks[1].first)
    checkpoint_wrapper(model.blocks[1])
    with pytest.warns(UserWarning, match="runs three times"):
        checkpoint_wrapper(model)
    assert_equal(gradients(world, model), gradients(world, make_model(world, [])))
    assert calls.count("1.first") == 1
    assert calls.count("1.second") == 2, "the outer second run stops before it"


@distributed(world_size=1)
def test_what_an_excluded_part_needs_is_kept_outside_of_the_checkpoint(world: World) -> None:
    platform, model, shapes = world.platform, make_model(world, []), []
    block = checkpoint_wrapper(model.blocks[0])
    x = platform.set_requires_grad_(platform.full((3, 4), 0.5, block.first.weight.dtype, world.device), True)

    def pack(kept: Any) -> Any:
        shapes.append(tuple(kept.shape))
        return kept

    def kept() -> list[tuple[int, ...]]:
        shapes.clear()
        with platform.saved_tensors_hooks(pack, lambda x: x):
            block(x)
        return list(shapes)

    assert kept() == [(3, 4)]
    checkpoint_exclude_wrapper(block.second)
    assert len(kept()) == 1, "saved by the innermost hooks, which are the part's own"
    assert_equal(gradients(world, model), gradients(world, make_model(world, [])))


@distributed(world_size=1)
def test_functions_are_wrapped_too(world: World) -> None:
    platform, calls = world.platform, []

    def function(x: Any, *, power: int) -> Any:
        """Its own words."""
        calls.append(power)
        return once(platform.sin(x))

    def inner(x: Any) -> Any:
        calls.append("once")
        return platform.exp(x)

    once = checkpoint_exclude_wrapper(inner)
    wrapped = checkpoint_wrapper(function)
    assert wrapped.__name__ == "function"
    assert wrapped.__doc__ == "Its own words."
    x = platform.set_requires_grad_(platform.full((2,), 0.5, "float32", world.device), True)
    y = wrapped(x, power=2)
    platform.backward([platform.sum(platform.sin(y))])
    assert calls == [2, "once", 2]
    np.testing.assert_allclose(
        platform.to_numpy(platform.get_grad(x)),
        np.cos(np.exp(np.sin(0.5))) * np.exp(np.sin(0.5)) * np.cos(0.5),
        rtol=1e-6,
    )
    once(x)
    assert calls[3:] == ["once"]


@distributed(world_size=1)
def test_checkpointed_modules_in_each_other_are_told(world: World) -> None:
    model = make_model(world, [])
    checkpoint_wrapper(model.blocks[0])
    with pytest.warns(UserWarning, match=r"Model is checkpointed now, and so is blocks.0 in it"):
        checkpoint_wrapper(model)
    with pytest.warns(UserWarning, match="what is inside of both runs three times"):
        checkpoint_wrapper(model.blocks[0])
    assert_equal(gradients(world, model), gradients(world, make_model(world, [])))


@distributed(world_size=1)
def test_wrong_calls_say_what_to_do(world: World) -> None:
    platform = world.platform

    class Bare(platform.Module):  # type: ignore[name-defined,misc]
        pass

    calls: list[tuple[Any, str]] = [
        (
            lambda: checkpoint(platform.full((2,), 1.0, "float32")),
            r"checkpoint\(block, x\), not checkpoint\(block\(x\)\)",
        ),
        (lambda: checkpoint(3), "takes a callable and its arguments, got int"),
        (lambda: checkpoint(print, early_stop=1), "early_stop is True or False, got 1"),
        (lambda: checkpoint(print, preserve_rng_state=None), "preserve_rng_state is True or False, got None"),
        (lambda: checkpoint(print, determinism_check="all"), "give one of 'default', 'operations', 'none'"),
        (lambda: checkpoint(print, context_fn=3), "a function that gives two context managers, got int"),
        (lambda: checkpoint(print, context_fn=lambda: None), "gives two context managers, .*, got None"),
        (
            lambda: checkpoint(print, context_fn=lambda: (nullcontext(), 3)),
            "gives two context managers, .* 3",
        ),
        (lambda: checkpoint_wrapper("block"), "takes a module or another callable, got str"),
        (lambda: checkpoint_wrapper(platform.Module), "takes a module, got the class .*: make one of it"),
        (
            lambda: checkpoint_wrapper(platform.ModuleList([])),
            "checkpoint_wrapper: a ModuleList has no forward, .*: call checkpoint_wrapper on each of its modules",
        ),
        (lambda: checkpoint_wrapper(Bare()), "checkpoint_wrapper: a Bare has no forward"),
        (
            lambda: checkpoint_exclude_wrapper(Bare()),
            "call checkpoint_exclude_wrapper on each of its modules",
        ),
        (
            lambda: checkpoint_wrapper(print, "selective"),
            "policy='selective': \"full\" keeps the arguments only",
        ),
        (lambda: checkpoint_wrapper(print, [3], policy_fn=[3]), "say the same thing: give one of them"),
        (lambda: checkpoint_wrapper(print, early_stop="no"), "early_stop is True or False, got 'no'"),
        (lambda: checkpoint_exclude_wrapper(None), "takes a module or another callable, got NoneType"),
        (
            lambda: checkpoint_exclude_wrapper(print, save_output=False),
            "leave it True, or do not exclude the part",
        ),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


@distributed(world_size=1)
def test_an_excluded_part_that_is_called_more_often_later_is_told(world: World) -> None:
    platform, times = world.platform, [1, 2]
    once = checkpoint_exclude_wrapper(platform.sin)

    def function(x: Any) -> Any:
        for _ in range(times.pop(0)):
            x = once(x)
        return platform.exp(x)

    x = platform.set_requires_grad_(platform.full((2,), 0.5, "float32", world.device), True)
    y = checkpoint(function, x)
    with pytest.raises(
        CheckpointError, match="called for the 2th time in the second run and was called 1 times"
    ):
        platform.backward([platform.sum(y)])
