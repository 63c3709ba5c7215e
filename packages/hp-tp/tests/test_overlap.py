"""Products beside communication: the values and gradients of the plain program, with the bytes of the plain program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hp_dtensor.chunk import chunk_offset, chunk_size, chunk_sizes
from hp_dtensor.transport import Cut
from hp_platform.testing import World, count_collectives, distributed
from hp_tp.overlap import OverlapPolicy, all_gather_matmul, matmul_reduce_scatter

PLAIN = OverlapPolicy()  # no input here is so large that anything runs beside
WHOLE = OverlapPolicy(min_nbytes=0, features_per_peer=1000)  # products are not cut, but gradients run beside
CUT = OverlapPolicy(min_nbytes=0, features_per_peer=0, chunk_nbytes=0, max_chunks=3)
SENDS = OverlapPolicy(min_nbytes=0, chunk_nbytes=0, max_chunks=2, gather_by="sends")
POLICIES = {"plain": PLAIN, "whole": WHOLE, "cut": CUT, "sends": SENDS}
WORLDS = (1, 2, 3, 4)
# Shape of the whole but for its features, and the dim that is cut.
LAYOUTS = {
    "one row": ((1,), 0),
    "rows": ((12,), 0),
    "prime rows": ((7,), 0),
    "no rows": ((0,), 0),
    "one sequence": ((1, 24, ), 1),
    "sequences": ((2, 12), 1),
    "prime sequences": ((3, 5), 1),
    "no sequence": ((0, 4), 1),
    "sequence first": ((12, 3), 0),
    "something between": ((2, 4, 3), 1),
}  # fmt: skip


def cut_of(world: World, length: int, dim: int, *, is_turned: bool = False) -> Cut:
    """How a dim is dealt; turned: along a mesh dim whose ranks descend."""
    assert world.group is not None
    places = tuple(range(world.size))
    index = world.size - 1 - world.rank if is_turned else world.rank
    return Cut(
        world.group, places[::-1] if is_turned else places, index, dim, chunk_sizes(length, world.size)
    )


def part(x: np.ndarray, dim: int, index: int, num_ranks: int) -> np.ndarray:
    """A rank's piece."""
    start, size = chunk_offset(x.shape[dim], num_ranks, index), chunk_size(x.shape[dim], num_ranks, index)
    return np.take(x, range(start, start + size), dim)


@dataclass
class Numbers:
    """Inputs, weights and what the loss weighs results with, by name."""

    values: dict[str, np.ndarray]

    @classmethod
    def of(cls, world: World, lead: tuple[int, ...], hidden: int) -> Numbers:
        random = np.random.default_rng(3)
        shapes = {
            "x": (*lead, 5),
            "first": (hidden, 5),
            "second": (hidden, 5),
            "third": (hidden, 5),
            "bias": (hidden,),
            "last": (4, hidden),
            "loss": (*lead, 4),
        }
        dtype = "float64" if world.platform.supports("reduce_float64", world.device_type) else "float32"
        return cls({name: random.normal(size=shape).astype(dtype) for name, shape in shapes.items()})


# Along which dim a rank holds a part of what.
FEATURES = {"first": 0, "second": 0, "third": 0, "bias": 0, "last": 1}


def leaves(world: World, values: dict[str, np.ndarray], frozen: tuple[str, ...] = ()) -> dict[str, Any]:
    platform = world.platform
    made = {name: platform.tensor(value, device=world.device) for name, value in values.items()}
    return {
        name: x if name in frozen or name == "loss" else platform.set_requires_grad_(x, True)
        for name, x in made.items()
    }


def block(platform: Any, first: Any, second: Any, third: Any) -> Any:
    """Something between the products that is not linear."""
    return platform.silu(first) * second + third * third


def plain(platform: Any, t: dict[str, Any]) -> Any:
    first = platform.linear(t["x"], t["first"], t["bias"])
    second, third = platform.linear(t["x"], t["second"]), platform.linear(t["x"], t["third"])
    return platform.linear(block(platform, first, second, third), t["last"])


def parallel(world: World, t: dict[str, Any], cut: Cut, policy: OverlapPolicy) -> Any:
    """Two weights share the gather as operands, the third one takes what has been gathered."""
    platform = world.platform
    (first, second), whole = all_gather_matmul(
        t["x"], [t["first"], t["second"]], cut, biases=[t["bias"], None], policy=policy
    )
    third = platform.linear(whole, t["third"])
    return matmul_reduce_scatter(block(platform, first, second, third), t["last"], cut, policy=policy)


def local(values: dict[str, np.ndarray], cut: Cut) -> dict[str, np.ndarray]:
    """This rank's parts."""
    num_ranks = len(cut.sizes)
    dims = {**FEATURES, "x": cut.dim, "loss": cut.dim}
    return {name: part(value, dims[name], cut.index, num_ranks) for name, value in values.items()}


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


# ---------------------------------------------------------------------------------------------------- communication
def communication(
    world: World, layout: str, policy: OverlapPolicy, frozen: tuple[str, ...] = ()
) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    """Of forward and of backward: kind -> launches and bytes."""
    platform = world.platform
    lead, dim = LAYOUTS[layout]
    numbers, cut = Numbers.of(world, lead, 8).values, cut_of(world, lead[dim], dim)
    mine = leaves(world, local(numbers, cut), frozen)
    with count_collectives() as forward:
        loss = platform.sum(parallel(world, mine, cut, policy) * mine["loss"])
    with count_collectives() as backward:
        platform.backward([loss])
    found = tuple(
        {kind: (number, counted.nbytes(kind)) for kind, number in counted.counts.items()}
        for counted in (forward, backward)
    )
    return found[0], found[1]


@distributed(world_size=(2, 4))
def test_as_many_bytes_are_moved_as_by_the_plain_program(world: World) -> None:
    platform = world.platform
    itemsize = 8 if platform.supports("reduce_float64", world.device_type) else 4
    gathered, summed = 12 * 5 * itemsize, 12 * 4 * itemsize  # whole input and result of "rows"
    is_asynchronous = platform.supports("async_collectives", world.device_type)
    for policy in (PLAIN, WHOLE):
        forward, backward = communication(world, "rows", policy)
        assert forward == {"all_gather": (1, gathered), "reduce_scatter": (1, summed)}
        assert backward == {"all_gather": (1, summed), "reduce_scatter": (1, gathered)}

    forward, backward = communication(world, "rows", CUT)
    chunks = 3 if is_asynchronous else 1
    assert forward == {"all_gather": (1, gathered), "reduce_scatter": (chunks, summed)}
    # The gradients of the weights hide the reduction as it is.
    assert backward == {"all_gather": (1, summed), "reduce_scatter": (1, gathered)}
    _, backward = communication(world, "rows", CUT, ("first", "second", "third", "bias", "last"))
    assert backward == {"all_gather": (1, summed), "reduce_scatter": (chunks, gathered)}

    forward, _ = communication(world, "rows", SENDS)
    if not is_asynchronous:
        assert forward == {"all_gather": (1, gathered), "reduce_scatter": (1, summed)}
        return
    # Own rows are not sent, and what is sent is counted on both ends: each rank sends its piece to every other.
    others = world.size - 1
    moved = 2 * others * gathered // world.size
    assert forward == {"batch_send_recv": (others, moved), "reduce_scatter": (2, summed)}


@distributed(world_size=2)
def test_only_inputs_of_the_size_in_the_policy_are_cut(world: World) -> None:
    if not world.platform.supports("async_collectives", world.device_type):
        return
    itemsize = 8 if world.platform.supports("reduce_float64", world.device_type) else 4
    summed = 12 * 4 * itemsize
    for min_nbytes, chunks in ((summed, 3), (summed + 1, 1)):
        policy = OverlapPolicy(min_nbytes=min_nbytes, chunk_nbytes=summed // 3)
        forward, _ = communication(world, "rows", policy)
        assert forward["reduce_scatter"] == (chunks, summed)


@distributed(world_size=1)
def test_one_rank_communicates_nothing(world: World) -> None:
    assert communication(world, "rows", CUT) == ({}, {})


def test_a_reduction_is_cut_into_chunks_of_the_size_in_the_policy() -> None:
    policy = OverlapPolicy(chunk_nbytes=16, max_chunks=4)
    numbers = {nbytes: policy.num_chunks(nbytes) for nbytes in (0, 31, 32, 47, 48, 64, 1000)}
    assert numbers == {0: 1, 31: 1, 32: 2, 47: 2, 48: 3, 64: 4, 1000: 4}
    assert OverlapPolicy(chunk_nbytes=0).num_chunks(0) == 1


def test_a_gather_is_cut_where_there_are_features_to_hide_it() -> None:
    policy = OverlapPolicy(features_per_peer=8)
    assert policy.cuts_gather(24, 4)
    assert not policy.cuts_gather(23, 4)
    # Whether pieces are sent must not depend on features, of which ranks may have different numbers.
    assert OverlapPolicy(gather_by="sends").cuts_gather(0, 4)


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


# -------------------------------------------------------------------------------------------------------- wrong calls
WRONG = {
    "no weight": (
        lambda t, cut: all_gather_matmul(t["x"], [], cut),
        r"all_gather_matmul needs a weight; to gather alone, redistribute the input",
    ),
    "a bias too many": (
        lambda t, cut: all_gather_matmul(t["x"], [t["first"]], cut, biases=[t["bias"], None]),
        r"all_gather_matmul got 1 weights and 2 biases: one each, or None",
    ),
    "features are cut": (
        lambda t, cut: all_gather_matmul(
            t["x"], [t["first"]], Cut(cut.group, cut.positions, cut.index, 1, cut.sizes)
        ),
        r"all_gather_matmul: the cut dim is one of those before the last, from 0; got dim 1 of an input of shape \(6, 5\)",
    ),
    "a whole for a piece": (
        lambda t, cut: all_gather_matmul(t["loss"], [t["last"]], cut),
        r"all_gather_matmul: dim 0 of the input is 6 here by the cut \(6, 6\), got shape \(12, 4\)",
    ),
    "a piece for a whole": (
        lambda t, cut: matmul_reduce_scatter(t["x"], t["first"], cut),
        r"matmul_reduce_scatter: dim 0 of the input is 12 here by the cut \(6, 6\), got shape \(6, 5\)",
    ),
    "a weight of other inputs": (
        lambda t, cut: all_gather_matmul(t["x"], [t["first"], t["last"]], cut),
        r"all_gather_matmul: weight 1 must be \(out, 5\) of float\d\d for an input of shape \(6, 5\), got \(4, 6\) of",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@distributed(world_size=2)
def test_a_wrong_call_says_what_to_change(world: World, name: str) -> None:
    numbers, cut = Numbers.of(world, (12,), 6).values, cut_of(world, 12, 0)
    t = leaves(world, {**numbers, "x": part(numbers["x"], 0, cut.index, 2)})
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call(t, cut)


def test_a_wrong_policy_says_what_to_change() -> None:
    with pytest.raises(ValueError, match="OverlapPolicy: max_chunks is 1 or more, got 0"):
        OverlapPolicy(max_chunks=0)
    with pytest.raises(ValueError, match="OverlapPolicy: min_nbytes is 0 or more, got -1"):
        OverlapPolicy(min_nbytes=-1)
    with pytest.raises(ValueError, match=r"gather_by is 'collective' or 'sends', got 'ring'"):
        OverlapPolicy(gather_by="ring")  # type: ignore[arg-type]
