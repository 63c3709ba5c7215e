"""A user's mistakes: each is refused at once, with what was given, what was expected and what to change."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import hp_platform
from hp_platform import collectives, process_groups
from hp_platform.capabilities import check_known
from hp_platform.testing import World, distributed

WRONG: dict[str, tuple[Callable[[World, Any], Any], type[Exception], str]] = {
    "unknown op": (
        lambda w, x: collectives.all_reduce(x, op="median"),
        ValueError,
        "unknown reduce operation 'median'; expected one of sum, mean",
    ),
    "integer mean": (
        lambda w, x: collectives.all_reduce(w.platform.cast(x, "int64"), op="mean"),
        ValueError,
        "mean of int64 would round: cast to a floating dtype, or use sum and divide",
    ),
    "largest complex number": (
        lambda w, x: collectives.all_reduce(w.platform.cast(x, "complex64"), op="max"),
        NotImplementedError,
        "max of complex64: backends reduce complex numbers by sum and mean alone; gather them",
    ),
    "sum of bool": (
        lambda w, x: collectives.all_reduce(w.platform.cast(x, "bool")),
        ValueError,
        "sum of bool has no meaning here: use max for any",
    ),
    "group of another kind": (
        lambda w, x: collectives.all_reduce(x, "dp"),
        ValueError,
        "expected a hp_platform.ProcessGroup or None, got str; .*mark_created_groups",
    ),
    "out of another shape": (
        lambda w, x: collectives.all_reduce(x, out=w.platform.zeros((2, 3), device=w.device)),
        ValueError,
        r"out has shape \(2, 3\), expected \(3, 2\)",
    ),
    "blocks that do not divide": (
        lambda w, x: collectives.reduce_scatter(x),
        ValueError,
        r"cuts dim 0 into 2 equal blocks; got shape \(3, 2\): pad it, or use reduce_scatter_uneven",
    ),
    "too few blocks": (
        lambda w, x: collectives.reduce_scatter_uneven([x]),
        ValueError,
        "needs one block per rank: got 1 for the group of 2",
    ),
    "blocks of two dtypes": (
        lambda w, x: collectives.reduce_scatter_uneven([x, w.platform.cast(x, "int32")]),
        ValueError,
        r"xs\[1\] is \(3, 2\) int32, xs\[0\] is \(3, 2\) float32: blocks may differ in the size of dim 0 only",
    ),
    "blocks of two widths": (
        lambda w, x: collectives.reduce_scatter_uneven([x, x[:, :1]]),
        ValueError,
        r"xs\[1\] is \(3, 1\) float32, xs\[0\] is \(3, 2\) float32",
    ),
    "out of another shape, alone": (
        lambda w, x: collectives.all_reduce(
            x, hp_platform.group_of([w.rank]), out=w.platform.zeros((4, 3, 2), device=w.device)
        ),
        ValueError,
        r"out has shape \(4, 3, 2\), expected \(3, 2\)",
    ),
    "too few sizes": (
        lambda w, x: collectives.all_gather_uneven(x, [3]),
        ValueError,
        "sizes needs one entry per rank: got 1 for the group of 2",
    ),
    "size that is not ours": (
        lambda w, x: collectives.all_gather_uneven(x, [5, 5]),
        ValueError,
        r"this is rank \d of the group, whose size is 5; got shape \(3, 2\)",
    ),
    "source outside": (
        lambda w, x: collectives.broadcast(x, 7),
        ValueError,
        "src is a global rank of the group: got 7, the group of 2 .* does not hold it",
    ),
    "scatter of nothing": (
        lambda w, x: collectives.scatter(None, x, w.rank, None),
        ValueError,
        "the source of a scatter gives one tensor per rank: got None for the group of 2",
    ),
    "scatter of unlike tensors": (
        lambda w, x: collectives.scatter([x, w.platform.cast(x, "float64")], x, w.rank),
        ValueError,
        r"xs\[1\] is \(3, 2\) .*float64, like is \(3, 2\) .*float32: all must be alike",
    ),
    "gather to nobody": (
        lambda w, x: collectives.gather(x, 2),
        ValueError,
        "dst is a global rank of the group: got 2",
    ),
    "all_to_all with one list": (
        lambda w, x: collectives.all_to_all(x, in_sizes=[1, 2]),
        ValueError,
        "give both in_sizes and out_sizes, or neither",
    ),
    "all_to_all that does not divide": (
        lambda w, x: collectives.all_to_all(x),
        ValueError,
        r"cuts dim 0 into 2 equal blocks; got shape \(3, 2\): give in_sizes and out_sizes",
    ),
    "all_to_all that does not add up": (
        lambda w, x: collectives.all_to_all(x, in_sizes=[1, 1], out_sizes=[1, 1]),
        ValueError,
        r"in_sizes \[1, 1\] add up to 2, but x has 3 rows",
    ),
    "all_to_all at odds with itself": (
        lambda w, x: collectives.all_to_all(
            x, in_sizes=[1, 2] if w.rank == 0 else [2, 1], out_sizes=[0, 3] if w.rank == 0 else [3, 0]
        ),
        ValueError,
        "sends itself 1 rows and expects 0: must be equal",
    ),
    "all_to_all of negative sizes": (
        lambda w, x: collectives.all_to_all(x, in_sizes=[-1, 4], out_sizes=[-1, 4]),
        ValueError,
        r"sizes are numbers of rows, 0 or more; got in_sizes \[-1, 4\]",
    ),
    "all_to_all of a number": (
        lambda w, x: collectives.all_to_all(x[0, 0], in_sizes=[0, 0], out_sizes=[0, 0]),
        ValueError,
        "sends rows along dim 0; got a 0-d tensor",
    ),
    "all_gather_uneven of a negative size": (
        lambda w, x: collectives.all_gather_uneven(x, [-1, 3] if w.rank else [3, -1]),
        ValueError,
        "sizes are numbers of rows, 0 or more; got",
    ),
    "send to itself": (lambda w, x: collectives.send(x, w.rank), ValueError, r"dst \d is this rank itself"),
    "receive from itself": (
        lambda w, x: collectives.recv(x, w.rank),
        ValueError,
        r"src \d is this rank itself",
    ),
    "transfer of another kind": (
        lambda w, x: collectives.batch_send_recv([collectives.P2POp("put", x, 1 - w.rank)]),  # type: ignore[arg-type]
        ValueError,
        "a transfer is 'send' or 'recv', got 'put'",
    ),
    "transfer into scattered rows": (
        lambda w, x: collectives.batch_send_recv(
            [collectives.P2POp("recv", w.platform.transpose(x, 0, 1), 1 - w.rank, is_target=True)]
        ),
        ValueError,
        r"is_target=True fills contiguous tensors of other dtypes than bool; got shape \(2, 3\) float32: receive a new tensor",
    ),
    "coalesced dtypes": (
        lambda w, x: collectives.all_gather_coalesced([x, w.platform.cast(x, "int32")]),
        ValueError,
        "needs one dtype per call, got float32, int32: group the tensors by dtype",
    ),
    "coalesced blocks": (
        lambda w, x: collectives.reduce_scatter_coalesced([x]),
        ValueError,
        r"xs\[0\] has shape \(3, 2\): dim 0 must be a multiple of the 2 ranks; pad it",
    ),
    "objects too few": (
        lambda w, x: collectives.scatter_object([1], w.rank),
        ValueError,
        "the source of a scatter gives one object per rank: got 1 objects",
    ),
    "ranks of a framework's handle": (
        lambda w, x: hp_platform.get_process_group_ranks(w.group.native),  # type: ignore[union-attr]
        ValueError,
        "expected a hp_platform.ProcessGroup or None, got .*mark_created_groups",
    ),
    "destroying a name": (
        lambda w, x: hp_platform.destroy_process_group("dp"),  # type: ignore[arg-type]
        ValueError,
        "expected a hp_platform.ProcessGroup or None, got str",
    ),
    "split into numbers": (
        lambda w, x: hp_platform.split_group(split_ranks=[0, 1]),  # type: ignore[list-item]
        ValueError,
        r"split_ranks must be a list of non-empty lists of global ranks, got \[0, 1\]",
    ),
    "time-out of a group in seconds": (
        lambda w, x: hp_platform.group_of([w.rank], timeout=5),  # type: ignore[arg-type]
        ValueError,
        "timeout must be a positive datetime.timedelta, got 5",
    ),
    "second world": (
        lambda w, x: hp_platform.init_process_group(),
        RuntimeError,
        "the default process group exists already .*destroy_process_group",
    ),
    "empty group": (
        lambda w, x: hp_platform.group_of([]),
        ValueError,
        "a group needs at least one rank, got none",
    ),
    "rank twice": (
        lambda w, x: hp_platform.group_of([0, 1, 0]),
        ValueError,
        r"a rank is given twice in \[0, 1, 0\]",
    ),
    "rank outside of the world": (
        lambda w, x: hp_platform.group_of([0, 9]),
        ValueError,
        r"ranks \[0, 9\] are not all in the world of 2 ranks \(0 to 1\)",
    ),
    "group of others": (
        lambda w, x: hp_platform.group_of([1 - w.rank]),
        RuntimeError,
        r"rank \d is not in the group of ranks \[\d\]; only members",
    ),
    "split into nothing": (
        lambda w, x: hp_platform.split_group(),
        ValueError,
        "split_ranks must be a list of non-empty lists of global ranks, got None",
    ),
    "split that overlaps": (
        lambda w, x: hp_platform.split_group(split_ranks=[[0, 1], [1]]),
        ValueError,
        r"split_ranks overlap: \[\[0, 1\], \[1\]\]",
    ),
    "split outside of the parent": (
        lambda w, x: hp_platform.split_group(split_ranks=[[0], [1, 5]]),
        ValueError,
        r"ranks \[5\] of split_ranks are not in the parent, the group of 2",
    ),
    "destroying a strange group": (
        lambda w, x: hp_platform.destroy_process_group(
            hp_platform.ProcessGroup((0,), 0, "gloo", timedelta(1), None)
        ),
        ValueError,
        "does not belong to the present world",
    ),
    "unknown device": (lambda w, x: w.platform.device("tpu"), ValueError, "tpu"),
    "unknown dtype": (lambda w, x: w.platform.dtype("float12"), ValueError, "float12"),
    "unknown capability": (
        lambda w, x: check_known("telepathy"),
        ValueError,
        "unknown capability 'telepathy'; known ones are",
    ),
    "capability asked of the platform": (
        lambda w, x: w.platform.supports("telepathy"),
        ValueError,
        "unknown capability 'telepathy'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@distributed(world_size=2)
def test_wrong_calls_are_refused_with_what_to_change(world: World, name: str) -> None:
    call, kind, message = WRONG[name]
    x = world.platform.zeros((3, 2), device=world.device)
    with pytest.raises(kind, match=message):
        call(world, x)


@distributed(world_size=2)
def test_a_tensor_without_memory_is_refused_before_anything_starts(world: World) -> None:
    platform = world.platform
    if not platform.supports("meta_tensors", world.device_type):
        return
    x = platform.empty((3, 2), "float32", "meta")
    with hp_platform.record_collectives() as record:
        for call in (collectives.all_reduce, collectives.all_gather):
            with pytest.raises(
                ValueError, match=r"a meta tensor of shape \(3, 2\) has no data to communicate"
            ):
                call(x)
    assert record.counts() == {}


BEFORE_THE_WORLD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "timeout in seconds": (
        {"timeout": 30},
        ValueError,
        "timeout must be a positive datetime.timedelta, got 30",
    ),
    "negative timeout": (
        {"timeout": timedelta(0)},
        ValueError,
        "timeout must be a positive datetime.timedelta",
    ),
    "rank alone": (
        {"rank": 0},
        ValueError,
        "give both rank and world_size, or neither: got rank=0, world_size=-1",
    ),
    "rank too large": (
        {"rank": 2, "world_size": 2},
        ValueError,
        "rank must lie between 0 and world_size - 1: got rank=2, world_size=2",
    ),
}


@distributed(world_size=1, init=False)
def test_a_world_that_cannot_be_is_refused(world: World) -> None:
    assert not hp_platform.is_initialized()
    for arguments, kind, message in BEFORE_THE_WORLD.values():
        with pytest.raises(kind, match=message):
            hp_platform.init_process_group(**arguments)
    with pytest.raises(
        RuntimeError,
        match=r"there is no default process group: call hp_platform.init_process_group\(\) first",
    ):
        hp_platform.get_world()
    assert process_groups.ensure_initialized(world.device_type) is hp_platform.get_world()
