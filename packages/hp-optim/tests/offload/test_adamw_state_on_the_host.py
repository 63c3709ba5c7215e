"""AdamW whose state lies on the host has the bits of one whose state does not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_optim import AdamW
from hp_optim.offload.late import TIMINGS
from hp_optim.offload.streaming import ALIGNMENT, Streamed, buckets_of
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from offload_twins import Twins, has_own_memory, late_of, ways, widest

SHAPES = [(33, 17), (129,), (), (1, 2, 3), (0, 4), (1021,), (16, 8)]
"""Beside buckets of 256 elements: tensors in one, over several, and none at all."""
LEFT_OUT = ((), (1, 3), (), (0, 5), ())


def small_buckets(world: World, moments: int = 2) -> dict[str, Any]:
    itemsize = 8 if widest(world) == "float64" else 4
    return {"offload_state": True, "offload_bucket": 2 * ALIGNMENT * moments * itemsize}


@distributed(world_size=1)
def test_steps_have_the_bits_of_state_beside_the_parameters(world: World) -> None:
    settings: list[dict[str, Any]] = [
        {"lr": 0.1, "fused": False},
        {"lr": 0.1, "amsgrad": True, "maximize": True, "weight_decay": 0.3, "fused": False},
        {"lr": 0.1},
        {"lr": world.platform.full((), 0.125, widest(world), world.device)},
        {"lr": world.platform.full((), 0.125, "float32", "cpu")},
    ]
    for kind in ways(world, AdamW):
        for setting in settings:
            buckets = small_buckets(world, 3 if setting.get("amsgrad") else 2)
            twins = Twins(world, SHAPES, (kind, AdamW), offloaded=buckets, **setting)
            for left_out in LEFT_OUT:
                twins.step(left_out)
                twins.check()
            late = late_of(twins.a)
            if late is not None:
                # All elements go both ways once a step, in which they have a gradient.
                assert late.nbytes["fetch"] == late.nbytes["store"] > 0


@distributed(world_size=1)
def test_float32_state_of_bfloat16_parameters_is_streamed_too(world: World) -> None:
    platform = world.platform
    for kind in ways(world, AdamW):
        twins = Twins(
            world,
            SHAPES,
            (kind, AdamW),
            dtype="bfloat16",
            offloaded=small_buckets(world),
            lr=0.1,
            fused=False,
        )
        for _ in range(3):
            for at, pair in enumerate(zip(twins.offloaded, twins.beside, strict=True)):
                value = twins.random.uniform(-1, 1, SHAPES[at])
                for parameter in pair:
                    parameter.main_grad = platform.tensor(value, "float32", world.device)
            twins.a.step()
            twins.b.step()
            twins.check()


@distributed(world_size=1)
def test_tensors_with_gaps_go_through_as_they_are(world: World) -> None:
    platform = world.platform
    random = np.random.default_rng(1)
    values, gradient = random.uniform(-1, 1, (40, 9)), random.uniform(-1, 1, (9, 40))
    for kind in ways(world, AdamW):
        found = []
        for cls, options in ((kind, small_buckets(world)), (AdamW, {})):
            turned = platform.transpose(platform.tensor(values, "float32", world.device), 0, 1)
            parameters = [
                platform.parameter(turned),
                platform.parameter(platform.tensor(values.T.copy(), "float32", world.device)),
            ]
            optimizer = cls(parameters, lr=0.1, fused=False, **options)
            for _ in range(2):
                for parameter in parameters:
                    given = platform.tensor(gradient.T.copy(), "float32", world.device)
                    platform.set_grad(parameter, platform.transpose(given, 0, 1))
                optimizer.step()
            found.append([platform.to_numpy(platform.detach(parameter)) for parameter in parameters])
        for mine, theirs in zip(*found, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@distributed(world_size=(1, 2, 3, 4))
def test_shards_and_divided_replicas_keep_their_state_on_the_host(world: World) -> None:
    meshes = [(n, world.size // n) for n in range(1, world.size + 1) if world.size % n == 0]
    for shape in meshes:
        mesh = init_device_mesh(world.device_type, shape)
        for kind in ways(world, AdamW):
            twins = Twins(
                world, SHAPES, (kind, AdamW), mesh, offloaded=small_buckets(world), lr=0.1, fused=False
            )
            for left_out in LEFT_OUT[:3]:
                twins.step(left_out)
                twins.check()
            # From a dict in which replicas keep pieces: they are put together, and cut again out of what all of them keep.
            for divides in (False, True):
                before = placements_of(twins)
                for each in (twins.a, twins.b):
                    saved = each.state_dict()
                    for group in saved["param_groups"]:
                        group["divide_replicas"] = divides
                    each.load_state_dict(saved)
                for _ in range(2):
                    twins.step()
                    twins.check()
                assert (placements_of(twins) != before) == (shape[0] > 1)


def placements_of(twins: Twins) -> list[Any]:
    entries = [twins.a.state.get(parameter) for parameter in twins.offloaded]
    return [tuple(entry["exp_avg"].placements) for entry in entries if entry]


@distributed(world_size=1)
def test_amsgrad_that_is_switched_on_begins_with_what_has_landed(world: World) -> None:
    for kind in ways(world, AdamW):
        options = {"lr": 0.1, "fused": False, "betas": (0.9, 0.5)}
        twins = Twins(world, [(700,)], (kind, AdamW), offloaded=small_buckets(world), **options)
        twins.step()
        for each in (twins.a, twins.b):
            each.param_groups[0]["amsgrad"] = True
        for _ in range(2):
            twins.step()
            twins.check()


@distributed(world_size=1)
def test_a_moment_that_somebody_has_exchanged_goes_to_the_host_too(world: World) -> None:
    platform = world.platform
    for kind in ways(world, AdamW):
        twins = Twins(world, [(40, 30)], (kind, AdamW), offloaded=small_buckets(world), lr=0.1, fused=False)
        twins.step()
        for each, parameter in ((twins.a, twins.offloaded[0]), (twins.b, twins.beside[0])):
            turned = platform.full((30, 40), 0.25, twins.dtype, world.device)
            each.state[parameter]["exp_avg_sq"] = platform.transpose(turned, 0, 1)
        for _ in range(2):
            twins.step()
            twins.check()


@distributed(world_size=1)
def test_an_update_that_fails_leaves_no_copy_that_the_computation_does_not_wait_for(world: World) -> None:
    platform, calls = world.platform, list[int]()
    if not platform.supports("write_into_view", world.device):
        return

    def fails(beside: Any, state: Any) -> None:
        calls.append(len(calls))
        if len(calls) == 3:
            raise KeyError("on purpose")

    for timing in TIMINGS:
        calls.clear()
        transfers = timing(platform, world.device)
        beside = [[platform.zeros((1000,), "float32", world.device)]]
        state = [[platform.fill_(transfers.empty_on_host((1000,), beside[0][0].dtype), 0.0)]]
        streamed = Streamed(platform, transfers, world.device, 4 * ALIGNMENT, beside, state)
        with pytest.raises(KeyError, match="on purpose"):
            streamed.run(fails)
        assert transfers.num_waiting == 0


@distributed(world_size=1)
def test_state_moves_between_host_and_device_when_the_option_or_the_dict_says_so(world: World) -> None:
    platform = world.platform
    for kind in ways(world, AdamW):
        twins = Twins(world, SHAPES, (kind, AdamW), offloaded=small_buckets(world), lr=0.1, fused=False)
        twins.step()
        twins.step((1,))
        saved = [each.state_dict() for each in (twins.a, twins.b)]
        assert [group["offload_state"] for group in saved[0]["param_groups"]] == [True]
        # Each from the state of the other: the option stays, and the numbers go on.
        for each, other in ((twins.a, saved[1]), (twins.b, saved[0])):
            each.load_state_dict(other)
        assert [each.param_groups[0]["offload_state"] for each in (twins.a, twins.b)] == [True, False]
        if has_own_memory(world):
            entry = twins.b.state[twins.beside[0]]
            assert platform.device_of(entry["exp_avg"]) == platform.device_of(twins.beside[0])
        twins.step()
        twins.check()
        twins.a.param_groups[0]["offload_state"] = False
        twins.step()
        entry = twins.a.state[twins.offloaded[0]]
        assert platform.device_of(entry["exp_avg"]) == platform.device_of(twins.offloaded[0])
        twins.a.param_groups[0]["offload_state"] = True
        twins.step()
        twins.check()


@distributed(world_size=1)
def test_a_loaded_dict_shares_no_memory_with_the_state(world: World) -> None:
    for kind in ways(world, AdamW):
        twins = Twins(world, [(5, 3)], (kind, kind), offloaded={"offload_state": True}, offload_bucket=64)
        for group in twins.b.param_groups:
            group["offload_state"] = True
        twins.step()
        before = twins.bits(twins.a.state[twins.offloaded[0]]["exp_avg"])
        twins.b.load_state_dict(twins.a.state_dict())
        twins.gradients()
        twins.b.step()
        after = twins.bits(twins.a.state[twins.offloaded[0]]["exp_avg"])
        np.testing.assert_array_equal(before, after)
        assert not np.array_equal(twins.bits(twins.b.state[twins.beside[0]]["exp_avg"]), after)


@distributed(world_size=1)
def test_whoever_reads_the_state_waits_for_the_copies_and_a_step_does_not(world: World) -> None:
    for kind in ways(world, AdamW):
        twins = Twins(world, [(700,)], (kind, AdamW), offloaded=small_buckets(world), lr=0.1)
        twins.step()
        late = late_of(twins.a)
        if late is None:
            continue
        late.log.clear()
        twins.step()
        # 700 elements in buckets of 256: two ahead, and each next one when a bucket is on its way back.
        assert late.log == ["fetch", "fetch", "fetch", "store", "store", "store"]
        twins.a.state_dict()
        assert late.log[-1] == "land"


def test_buckets_hold_all_elements_once_and_pieces_are_aligned() -> None:
    for numels, room in (([5, 300, 0, 128, 1], 256), ([1000], 128), ([], 128), ([256, 256], 256)):
        for may_cut in (True, False):
            buckets = buckets_of(numels, [may_cut] * len(numels), room)
            covered: list[list[tuple[int, int]]] = [[] for _ in numels]
            for bucket in buckets:
                ends = [piece.offset + piece.length for piece in bucket]
                assert all(a <= b.offset for a, b in zip(ends, bucket[1:], strict=False))
                assert all(piece.offset % ALIGNMENT == piece.start % ALIGNMENT == 0 for piece in bucket)
                assert ends[-1] <= room or (not may_cut and len(bucket) == 1)
                for piece in bucket:
                    assert piece.length > 0
                    covered[piece.number].append((piece.start, piece.start + piece.length))
            for numel, parts in zip(numels, covered, strict=True):
                assert [start for start, _ in parts] == [0, *[stop for _, stop in parts[:-1]]][: len(parts)]
                assert (parts[-1][1] if parts else 0) == numel


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload_state": 1}, "AdamW: offload_state is 1; it must be True or False"),
        ({"offload_bucket": 0}, "AdamW: offload_bucket is 0; expected bytes, a whole number of at least 1"),
        ({"offload_bucket": 1.5}, "AdamW: offload_bucket is 1.5; expected bytes"),
        ({"offload_bucket": True}, "AdamW: offload_bucket is True; expected bytes"),
    ],
)
@distributed(world_size=1)
def test_wrong_options_are_refused(world: World, options: dict[str, Any], message: str) -> None:
    parameter = world.platform.parameter(world.platform.zeros((2,), "float32", world.device))
    with pytest.raises(ValueError, match=message):
        AdamW([parameter], **options)
