"""Products beside communication: the values and gradients of the plain program, with the bytes of the plain program."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_platform.testing import World, distributed
from hp_tp.overlap import OverlapPolicy, all_gather_matmul, matmul_reduce_scatter

sys.path.insert(0, str(Path(__file__).parent))
from overlap_block import (
    CUT,
    LAYOUTS,
    PLAIN,
    SENDS,
    WHOLE,
    Numbers,
    block,
    cut_of,
    leaves,
    local,
    parallel,
    part,
)

POLICIES = {"plain": PLAIN, "whole": WHOLE, "cut": CUT, "sends": SENDS}
WORLDS = (1, 2, 3, 4)


def plain(platform: Any, t: dict[str, Any]) -> Any:
    first = platform.linear(t["x"], t["first"], t["bias"])
    second, third = platform.linear(t["x"], t["second"]), platform.linear(t["x"], t["third"])
    return platform.linear(block(platform, first, second, third), t["last"])


def near(world: World, got: Any, expected: Any, name: str) -> None:
    """float64: sums of some tens of products in another order; float32 on npu likewise, in its own units."""
    got, expected = world.platform.to_numpy(world.platform.detach(got)), np.asarray(expected)
    limit = 1e-12 if got.dtype == np.float64 else 1e-4
    assert got.shape == expected.shape, name
    np.testing.assert_allclose(
        got, expected, rtol=limit, atol=limit * max(1.0, np.abs(expected).max(initial=0)), err_msg=name
    )


def check(
    world: World,
    layout: str,
    policy: OverlapPolicy,
    hidden: int = 6,
    frozen: tuple[str, ...] = (),
    *,
    is_turned: bool = False,
) -> None:
    platform = world.platform
    lead, dim = LAYOUTS[layout]
    numbers = Numbers.of(world, lead, hidden).values
    cut = cut_of(world, lead[dim], dim, is_turned=is_turned)
    whole, mine = leaves(world, numbers, frozen), leaves(world, local(numbers, cut), frozen)
    expected, got = plain(platform, whole), parallel(world, mine, cut, policy)
    where = f"{layout}, {policy}, {hidden} features, without {frozen}"
    to_numpy = lambda x: platform.to_numpy(platform.detach(x))
    near(world, got, part(to_numpy(expected), dim, cut.index, world.size), f"result: {where}")
    platform.backward([platform.sum(expected * whole["loss"])])
    platform.backward([platform.sum(got * mine["loss"])])
    for name in set(numbers) - {"loss", *frozen}:
        grads = {name: to_numpy(platform.get_grad(whole[name]))}
        near(
            world,
            platform.get_grad(mine[name]),
            local(grads, cut)[name],
            f"gradient of {name}: {where}",
        )


@pytest.mark.parametrize("policy", POLICIES)
@distributed(world_size=WORLDS)
def test_values_and_gradients_are_those_of_one_process(world: World, policy: str) -> None:
    for layout in LAYOUTS:
        check(world, layout, POLICIES[policy])


@pytest.mark.parametrize("policy", POLICIES)
@distributed(world_size=WORLDS)
def test_features_may_be_dealt_unevenly_and_some_ranks_have_none(world: World, policy: str) -> None:
    for hidden in (1, 3, 7):
        for layout in ("rows", "prime rows", "sequences"):
            check(world, layout, POLICIES[policy], hidden)


@pytest.mark.parametrize("policy", POLICIES)
@distributed(world_size=2)
def test_without_gradients_of_weights_the_reduction_is_cut_and_nothing_else_changes(
    world: World, policy: str
) -> None:
    weights = ("first", "second", "third", "bias", "last")
    for layout in ("rows", "prime rows", "sequences", "sequence first"):
        check(world, layout, POLICIES[policy], frozen=weights)
        check(world, layout, POLICIES[policy], frozen=("x",))
        check(world, layout, POLICIES[policy], frozen=("first", "last"))


@pytest.mark.parametrize("policy", POLICIES)
@distributed(world_size=3)
def test_ranks_may_descend_along_the_mesh_dim(world: World, policy: str) -> None:
    for layout in ("rows", "prime rows", "sequences"):
        check(world, layout, POLICIES[policy], is_turned=True)


@distributed(world_size=2)
def test_without_recording_values_are_the_same(world: World) -> None:
    platform = world.platform
    for layout in ("rows", "sequences", "prime rows"):
        lead, dim = LAYOUTS[layout]
        numbers, cut = Numbers.of(world, lead, 6).values, cut_of(world, lead[dim], dim)
        with platform.no_grad():
            expected = platform.to_numpy(plain(platform, leaves(world, numbers)))
            for policy in POLICIES.values():
                got = parallel(world, leaves(world, local(numbers, cut)), cut, policy)
                assert not platform.requires_grad(got)
                near(world, got, part(expected, dim, cut.index, world.size), layout)


# MindSpore 2.10's own second derivatives of matrix products are wrong, so there is nothing to compare with.
@pytest.mark.parametrize("policy", POLICIES)
@distributed(world_size=(2, 3), backends=("torch", "cuda", "npu"))
def test_second_derivatives_are_those_of_one_process(world: World, policy: str) -> None:
    platform = world.platform
    names = ("x", "first", "second", "third", "bias", "last")
    for layout in ("rows", "prime rows", "sequences"):
        lead, dim = LAYOUTS[layout]
        numbers, cut = Numbers.of(world, lead, 6).values, cut_of(world, lead[dim], dim)

        def first_and_second(t: dict[str, Any], y: Any) -> tuple[list[Any], list[Any]]:
            loss = platform.sum(y * y * t["loss"])
            grads = platform.grad([loss], [t[name] for name in names], create_graph=True)
            total = platform.sum(grads[0] * grads[0])
            for grad in grads[1:]:
                total = total + platform.sum(grad * grad)
            return grads, platform.grad([total], [t[name] for name in names])

        whole, mine = leaves(world, numbers), leaves(world, local(numbers, cut))
        expected = first_and_second(whole, plain(platform, whole))
        got = first_and_second(mine, parallel(world, mine, cut, POLICIES[policy]))
        for order in (0, 1):
            known = {
                name: platform.to_numpy(platform.detach(x))
                for name, x in zip(names, expected[order], strict=True)
            }
            for name, grad in zip(names, got[order], strict=True):
                near(
                    world,
                    grad,
                    local(known, cut)[name],
                    f"derivative {order + 1} by {name}, {layout}, {policy}",
                )


@distributed(world_size=2)
def test_the_backward_says_that_it_begins(world: World) -> None:
    platform = world.platform
    numbers, cut = Numbers.of(world, (12,), 6).values, cut_of(world, 12, 0)
    mine, calls = leaves(world, local(numbers, cut)), []
    for policy in POLICIES.values():
        calls.clear()
        (product,), whole = all_gather_matmul(
            mine["x"], [mine["first"]], cut, policy=policy, used=lambda: calls.append(1)
        )
        loss = platform.sum(product) + platform.sum(whole)
        assert not calls
        platform.backward([loss])
        assert calls == [1]


@distributed(world_size=2, backends=("torch", "cuda", "npu"))
def test_a_weight_that_is_made_when_it_is_used_has_its_gradient(world: World) -> None:
    """As fully_shard shows weights whose gradients come in another dtype."""
    platform = world.platform
    numbers = Numbers.of(world, (12,), 6).values
    cut = cut_of(world, 12, 0)
    for policy in POLICIES.values():
        grads = []
        for is_made in (False, True):
            t = leaves(world, local(numbers, cut))
            if is_made:
                for name in ("first", "last"):
                    real = t[name]
                    t[name] = platform.stand_in(
                        tuple(real.shape), real.dtype, world.device, lambda real=real: real
                    )
                    t[f"real {name}"] = real
            (y,), _ = all_gather_matmul(t["x"], [t["first"]], cut, biases=[t["bias"]], policy=policy)
            y = matmul_reduce_scatter(y, t["last"], cut, policy=policy)
            platform.backward([platform.sum(y * t["loss"])])
            names = ("real first", "real last") if is_made else ("first", "last")
            grads.append([platform.to_numpy(platform.get_grad(t[name])) for name in names])
        for expected, got in zip(*grads, strict=True):
            np.testing.assert_array_equal(got, expected)


@distributed(world_size=2)
def test_a_whole_that_alone_is_used_has_a_gradient(world: World) -> None:
    """Ranks weigh it differently: by their rank plus one."""
    platform = world.platform
    numbers = Numbers.of(world, (12,), 6).values
    for policy in POLICIES.values():
        mine = leaves(world, local(numbers, cut_of(world, 12, 0)))
        _, whole = all_gather_matmul(mine["x"], [mine["first"]], cut_of(world, 12, 0), policy=policy)
        platform.backward([platform.sum(whole) * (world.rank + 1)])
        near(world, platform.get_grad(mine["x"]), np.full((6, 5), 3.0, numbers["x"].dtype), "x")
        assert platform.get_grad(mine["first"]) is None
