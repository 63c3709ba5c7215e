"""A checkpointed call is the plain call: values, gradients, random numbers; and it keeps only its arguments."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hp_platform import RandomStream, default_random_stream
from hp_platform.draws import Region
from hp_platform.platform import require
from hp_platform.testing import World, distributed
from hp_recompute import CheckpointError, checkpoint


class Parts:
    """Weights and an input, the same for every call with the same seed."""

    def __init__(self, world: World, seed: int = 0) -> None:
        self.platform, self.device = world.platform, world.device
        random = np.random.default_rng(seed)
        platform = world.platform
        self.dtype = platform.dtype(
            "float64" if platform.supports("float64_compute", self.device) else "float32"
        )

        def made(*shape: int) -> Any:
            return platform.tensor(random.uniform(-1, 1, shape), self.dtype, self.device)

        self.weights = [platform.parameter(made(4, 4)) for _ in range(3)]
        self.x = platform.set_requires_grad_(made(3, 4), True)

    def layer(self, x: Any, number: int) -> Any:
        platform = self.platform
        return platform.gelu(platform.matmul(platform.sin(x), self.weights[number]))

    def gradients(self) -> list[Any]:
        """Of what has one."""
        found = [self.platform.get_grad(x) for x in (self.x, *self.weights)]
        return [self.platform.to_numpy(grad) for grad in found if grad is not None]


def compared(world: World, run: Any, plain: Any) -> None:
    """``run(parts)`` and ``plain(parts)`` have the same values and gradients to the bit."""
    found = []
    for program in (run, plain):
        parts = Parts(world)
        y = program(parts)
        parts.platform.backward([parts.platform.sum(y * y)])
        found.append([parts.platform.to_numpy(parts.platform.detach(y)), *parts.gradients()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def plain(parts: Parts) -> Any:
    x = parts.x
    for number in range(3):
        x = parts.layer(x, number)
    return x


@distributed(world_size=1)
def test_values_and_gradients_are_those_of_the_plain_call(world: World) -> None:
    for early_stop in (True, False):

        def run(parts: Parts, early_stop: bool = early_stop) -> Any:
            x = parts.x
            for number in range(3):
                x = checkpoint(parts.layer, x, number, early_stop=early_stop)
            return x

        compared(world, run, plain)


@distributed(world_size=1)
def test_checkpoints_nest(world: World) -> None:
    def inner(parts: Parts, x: Any, first: int) -> Any:
        for number in range(first, 3):
            x = checkpoint(parts.layer, x, number)
        return x

    def run(parts: Parts) -> Any:
        return checkpoint(lambda x: checkpoint(inner, parts, parts.layer(x, 0), 1), parts.x)

    compared(world, run, plain)


@distributed(world_size=1)
def test_a_function_runs_twice_and_stops_when_all_is_there(world: World) -> None:
    parts, calls = Parts(world), []

    def function(x: Any) -> Any:
        calls.append("begin")
        y = parts.layer(x, 0)
        calls.append("end")
        return y

    platform = world.platform
    platform.backward([platform.sum(checkpoint(function, parts.x))])
    assert calls == ["begin", "end", "begin"]
    with platform.no_grad():
        checkpoint(function, parts.x)
    assert calls[3:] == ["begin", "end"]


@distributed(world_size=1)
def test_a_second_run_that_differs_is_told(world: World) -> None:
    platform, count = world.platform, []

    def counting(x: Any) -> Any:
        count.append(0)
        return platform.sin(x) if len(count) % 2 else platform.sin(platform.sum(x, 0))

    parts = Parts(world)
    with pytest.raises(CheckpointError, match="saved tensor 0 of a checkpointed function is"):
        platform.backward([platform.sum(checkpoint(counting, parts.x))])
    if platform.supports("operation_dispatch", world.device):
        with pytest.raises(CheckpointError, match="operation 0 of a checkpointed function is .*sum.*sin"):
            platform.backward([platform.sum(checkpoint(counting, parts.x, determinism_check="operations"))])


@distributed(world_size=1)
def test_only_arguments_are_kept_at_any_depth(world: World) -> None:
    platform, parts = world.platform, Parts(world)

    def saved_by(program: Any) -> list[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = []

        def pack(x: Any) -> Any:
            shapes.append(tuple(x.shape))
            return x

        with platform.saved_tensors_hooks(pack, lambda x: x):
            program(parts)
        return shapes

    assert len(saved_by(plain)) > 3
    assert saved_by(lambda parts: checkpoint(plain, parts)) == []
    assert saved_by(lambda parts: checkpoint(parts.layer, parts.x, 0)) == [(3, 4)]
    inner = lambda x: checkpoint(parts.layer, parts.layer(x, 0), 1)
    assert saved_by(lambda parts: checkpoint(inner, parts.x)) == [(3, 4)]


@distributed(world_size=1)
def test_what_is_between_is_freed_after_forward(world: World) -> None:
    platform, parts, middles = world.platform, Parts(world), []

    def function(x: Any) -> Any:
        middle = parts.layer(x, 0)
        middles.append(weakref.ref(middle))
        return platform.sin(middle)

    y = checkpoint(function, parts.x)
    gc.collect()
    assert middles[0]() is None
    platform.backward([platform.sum(y)])


@distributed(world_size=1)
def test_graphs_go_backward_in_any_order_and_any_number_of_times(world: World) -> None:
    results = []
    for checkpoints in (True, False):
        parts = Parts(world)
        platform = parts.platform
        run = checkpoint if checkpoints else lambda function, *args: function(*args)
        outputs = [run(parts.layer, parts.x * scale, 0) for scale in (1.0, 2.0, 3.0)]
        for index in (1, 0, 2):
            platform.backward([platform.sum(outputs[index])], retain_graph=index == 0)
        platform.backward([platform.sum(outputs[0])])
        results.append(parts.gradients())
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@distributed(world_size=1)
def test_a_backward_of_a_backward_is_that_of_the_plain_call(world: World) -> None:
    platform = world.platform
    if not platform.supports("double_backward", world.device):
        with pytest.raises(NotImplementedError):
            require(platform, "double_backward", world.device, what="the test")
        return
    found = []
    for run in (checkpoint, lambda function, *args: function(*args)):
        parts = Parts(world)
        y = run(parts.layer, parts.x, 0)
        (first,) = platform.grad([platform.sum(y * y)], [parts.x], create_graph=True)
        platform.backward([platform.sum(first * first)])
        found.append(parts.gradients())
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12 if "64" in str(one.dtype) else 1e-5)


@distributed(world_size=1)
def test_arguments_may_lie_in_containers_and_be_no_tensors(world: World) -> None:
    @dataclass
    class Given:
        x: Any
        number: int

    def run(parts: Parts) -> Any:
        def function(given: Given, *, more: dict[str, Any], note: str) -> Any:
            assert note == "kept"
            return parts.layer(given.x, given.number) + more["inputs"][0]

        x = parts.x
        return checkpoint(function, Given(x, 1), more={"inputs": [x * 2, None]}, note="kept")

    compared(world, run, lambda parts: parts.layer(parts.x, 1) + parts.x * 2)


@distributed(world_size=1)
def test_random_numbers_are_drawn_again_and_count_once(world: World) -> None:
    platform, stream = world.platform, default_random_stream()
    region = Region.whole((3, 4))

    def dropped(x: Any) -> Any:
        place = stream.next()
        ones = platform.full((3, 4), 1.0, x.dtype, platform.device_of(x))
        return platform.sin(x * platform.dropout(ones, 0.5, place.seed, place.number, region))

    found = []
    for run in (checkpoint, lambda function, *args: function(*args)):
        stream.manual_seed(7)
        parts = Parts(world)
        y = run(dropped, run(dropped, parts.x))
        stream.next()
        platform.backward([platform.sum(y * y)])
        found.append((platform.to_numpy(platform.get_grad(parts.x)), stream.get_state()))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] == {"seed": 7, "number": 3}


@distributed(world_size=1)
def test_streams_of_ones_own_are_wound_back_too(world: World) -> None:
    platform, found = world.platform, []
    for run in (checkpoint, lambda function, *args: function(*args)):
        own, parts = RandomStream(3), Parts(world)

        def dropped(x: Any, own: RandomStream = own) -> Any:
            place = own.next()
            ones = platform.full((3, 4), 1.0, x.dtype, platform.device_of(x))
            return platform.sin(
                x * platform.dropout(ones, 0.5, place.seed, place.number, Region.whole((3, 4)))
            )

        y = run(dropped, parts.x)
        own.next()
        platform.backward([platform.sum(y)])
        found.append((platform.to_numpy(platform.get_grad(parts.x)), own.get_state()))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] == {"seed": 3, "number": 2}


@distributed(world_size=1)
def test_an_exception_inside_leaves_nothing_behind(world: World) -> None:
    platform, parts, calls = world.platform, Parts(world), []

    def fails(x: Any) -> Any:
        calls.append(0)
        if len(calls) == 2:
            raise KeyError("the second time")
        return platform.sin(platform.sin(x))

    y = checkpoint(fails, parts.x)
    with pytest.raises(KeyError, match="the second time"):
        platform.backward([platform.sum(y)], retain_graph=True)
    assert not platform.is_recomputing()
    compared(world, plain, lambda parts: checkpoint(plain, parts))

    def fails_at_once(x: Any) -> Any:
        platform.sin(x)
        raise KeyError("the first time")

    with pytest.raises(KeyError, match="the first time"):
        checkpoint(fails_at_once, parts.x)
    compared(world, plain, lambda parts: checkpoint(plain, parts))


@distributed(world_size=1)
def test_an_argument_written_before_backward_is_refused(world: World) -> None:
    platform, parts = world.platform, Parts(world)
    if not platform.supports("version_counter", world.device):
        assert platform.version(parts.x) == 0
        return
    x = parts.x * 2
    y = checkpoint(parts.layer, x, 0)
    with platform.no_grad():
        platform.add_(x, 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        platform.backward([platform.sum(y)])
