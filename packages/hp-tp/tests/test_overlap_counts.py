"""What is cut for overlap, and how many bytes are moved then."""

from __future__ import annotations

import sys
from pathlib import Path

from hp_platform.testing import World, count_collectives, distributed
from hp_tp.overlap import OverlapPolicy

sys.path.insert(0, str(Path(__file__).parent))
from overlap_block import CUT, LAYOUTS, PLAIN, SENDS, WHOLE, Numbers, cut_of, leaves, local, parallel


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
