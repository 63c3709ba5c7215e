"""What was communicated in forward is kept when it is asked for: in backward only the gradients' own collectives are left."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_dtensor import Partial, Replicate, Shard, distribute_tensor
from hp_fsdp import fully_shard
from hp_platform import collectives, init_device_mesh
from hp_platform.collectives import differentiable
from hp_platform.testing import World, count_collectives, distributed
from hp_recompute import (
    CheckpointError,
    checkpoint,
    checkpoint_exclude_wrapper,
    checkpoint_wrapper,
    keep_collectives_policy,
)

sys.path.insert(0, str(Path(__file__).parent))
from recompute_parts import assert_equal, in_styles, stack_of_two_layers, whole, widest


def make_model(world: World) -> Any:
    """Two blocks of two layers, which tensor parallel styles can cut."""
    platform = world.platform
    return stack_of_two_layers(
        world, lambda block, x: platform.sin(x + block.down(platform.silu(block.up(x)))), num_blocks=2
    )


def gradients(world: World, model: Any) -> list[Any]:
    platform = world.platform
    x = tensor(world, 3, 4)
    y = model(x)
    platform.backward([platform.sum(y * y)])
    found = [platform.get_grad(each) for each in (x, *(p for _, p in platform.named_parameters(model)))]
    return [platform.to_numpy(whole(each)) for each in found]


def plain(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return function(*args)


def tensor(world: World, *shape: int) -> Any:
    values = np.random.default_rng(world.rank).uniform(-1, 1, shape)
    return world.platform.set_requires_grad_(world.platform.tensor(values, widest(world), world.device), True)


def compared(world: World, program: Callable[[Callable[..., Any]], list[Any]], **options: Any) -> None:
    """``program(run)`` gives the same bits, and as many collectives, with a checkpoint that keeps them as without one."""
    results, counts = [], []
    for run in (plain, checkpoint):
        chosen = {} if run is plain else {"policy_fn": keep_collectives_policy, **options}

        def called(function: Any, *args: Any, run: Any = run, chosen: Any = chosen) -> Any:
            return run(function, *args, **chosen)

        with count_collectives() as counted:
            results.append([world.platform.to_numpy(whole(x)) for x in program(called)])
        counts.append(counted.counts)
    assert_equal(results[1], results[0])
    assert counts[1] == counts[0]


@distributed(world_size=(2, 3))
def test_no_collective_is_launched_again(world: World) -> None:
    platform = world.platform
    one, other = world.rank, (world.rank + 1) % world.size
    sizes = [rank + 1 for rank in range(world.size)]
    functions: list[Callable[[Any], Any]] = [
        differentiable.all_reduce,
        lambda x: differentiable.all_reduce(x, op="mean"),
        differentiable.all_gather,
        differentiable.reduce_scatter,
        differentiable.all_to_all,
        lambda x: differentiable.broadcast(x, 0),
        lambda x: differentiable.all_gather_uneven(platform.narrow(x, 0, 0, sizes[one]), sizes),
        lambda x: differentiable.gather(x, 0),
        lambda x: differentiable.scatter(platform.narrow(x, 0, 0, world.size), 0),
        lambda x: differentiable.exchange(x, other, (one - 1) % world.size),
        lambda x: x * collectives.all_reduce(platform.detach(x), async_op=True).wait(),
        lambda x: x * collectives.all_reduce_coalesced([platform.detach(x)]).wait()[0],
    ]
    for options in ({}, {"early_stop": False}):

        def program(run: Callable[..., Any]) -> list[Any]:
            x = tensor(world, 6, 2)
            for function in functions:
                y = run(lambda x, function=function: platform.sin(function(platform.sin(x))), x)
                platform.backward([platform.sum(y * y)])
            return [platform.get_grad(x)]

        compared(world, program, **options)


@distributed(world_size=2)
def test_several_backwards_nested_calls_and_excluded_parts_take_the_kept_results(world: World) -> None:
    platform = world.platform
    once = checkpoint_exclude_wrapper(lambda x: platform.sin(differentiable.all_reduce(x, op="mean")))

    def inner(x: Any) -> Any:
        return platform.sin(differentiable.all_reduce(platform.sin(x)))

    def outer(run: Callable[..., Any], x: Any) -> Any:
        return platform.sin(differentiable.all_gather(run(inner, once(inner(x)))))

    def program(run: Callable[..., Any]) -> list[Any]:
        xs = [tensor(world, 4, 2) * scale for scale in (1.0, 2.0)]
        leaves = [platform.set_requires_grad_(platform.detach(x), True) for x in xs]
        losses = [platform.sum(run(outer, run, x)) for x in leaves]
        platform.backward([losses[1]], retain_graph=True)
        platform.backward([losses[0]])
        platform.backward([losses[1]])
        return [platform.get_grad(x) for x in leaves]

    compared(world, program)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Partial()], ids=str)
@distributed(world_size=2)
def test_redistributions_are_kept(world: World, placement: Any) -> None:
    platform = world.platform
    mesh = init_device_mesh(world.device_type, (world.size,))

    def program(run: Callable[..., Any]) -> list[Any]:
        values = platform.tensor(np.linspace(-1, 1, 20).reshape(5, 4), widest(world), world.device)
        x = platform.set_requires_grad_(distribute_tensor(values, mesh, [Replicate()]), True)

        def function(x: Any) -> Any:
            there = platform.sin(x).redistribute(placements=[placement])
            back = there.redistribute(placements=[Replicate()])
            return platform.sin(platform.sin(back).redistribute(placements=[Shard(1)]))

        run(function, x).sum().backward()
        return [x.grad]

    compared(world, program)


@distributed(world_size=2)
def test_tensor_parallel_layers_communicate_once_and_units_gather_as_ever(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))

    def parallel(wrap: Callable[[Any], Any]) -> Any:
        return in_styles(world, make_model(world), wrap)

    def units(wrap: Callable[[Any], Any]) -> Any:
        model = make_model(world)
        for block in model.blocks:
            fully_shard(block, mesh)
        fully_shard(model, mesh)
        return wrap(model) or model

    def keeping(module: Any) -> Any:
        return checkpoint_wrapper(module, keep_collectives_policy, early_stop=False)

    for build in (parallel, units):
        counts, found = [], []
        for wrap in (lambda module: None, keeping, checkpoint_wrapper):
            model = build(wrap)
            with count_collectives() as counted:
                found.append(gradients(world, model))
            counts.append(counted.counts)
        assert_equal(found[1], found[0])
        assert_equal(found[2], found[0])
        if build is parallel:
            assert counts[1] == counts[0]
        else:
            assert counts[1]["all_gather"] >= counts[2]["all_gather"] >= counts[0]["all_gather"]


@distributed(world_size=2)
def test_what_differs_and_what_is_written_is_told(world: World) -> None:
    platform, steps = world.platform, [1.0, 2.0]

    def differs(x: Any) -> Any:
        y = platform.sin(x)
        gathers = steps.pop() == 1.0
        return platform.sin(differentiable.all_gather(y) if gathers else differentiable.all_reduce(y))

    y = checkpoint(differs, tensor(world, 4, 2), policy_fn=keep_collectives_policy)
    with pytest.raises(
        CheckpointError, match=r"collective 0 .* is all_gather of .* and in the first it was all_reduce"
    ):
        platform.backward([platform.sum(y)])

    if not platform.supports("version_counter", world.device):
        return

    def writes(x: Any) -> Any:
        return platform.sin(platform.add_(differentiable.all_reduce(platform.sin(x)), 1.0))

    y = checkpoint(writes, tensor(world, 4, 2), policy_fn=[keep_collectives_policy])
    with pytest.raises(CheckpointError, match="the result of all_reduce .* was changed in place afterwards"):
        platform.backward([platform.sum(y)])


@distributed(world_size=1)
def test_the_policy_is_given_and_not_called(world: World) -> None:
    with pytest.raises(ValueError, match="give it to policy_fn as it is, or in a list of operations"):
        keep_collectives_policy(None, "mm")
    if world.platform.supports("operation_dispatch", world.device):
        with pytest.raises(ValueError, match="it is not known which operations <built-in function print>"):
            checkpoint(print, policy_fn=[keep_collectives_policy, print])
