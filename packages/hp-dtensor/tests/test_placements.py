"""Placements as values, the chunk rule, and where pieces lie; no processes."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_dtensor import Partial, Placement, Replicate, Shard
from hp_dtensor.chunk import chunk_length, chunk_offset, chunk_size, chunk_sizes
from hp_dtensor.rule_checker import CheckerMesh
from hp_dtensor.spec import local_block, make_spec


def test_placements_are_values() -> None:
    assert Shard(1) == Shard(1) != Shard(0)
    assert Partial() == Partial("sum") != Partial("avg")
    assert Partial("mean") == Partial("avg")
    assert len({Shard(0), Shard(0), Replicate(), Replicate(), Partial(), Partial("sum")}) == 3
    assert [repr(p) for p in (Shard(-1), Replicate(), Partial())] == [
        "Shard(-1)",
        "Replicate()",
        "Partial('sum')",
    ]
    with pytest.raises(AttributeError):
        Shard(0).dim = 1  # type: ignore[misc]


def test_placements_say_what_they_are() -> None:
    kinds = [(p.is_shard(), p.is_replicate(), p.is_partial()) for p in (Shard(2), Replicate(), Partial())]
    assert kinds == [(True, False, False), (False, True, False), (False, False, True)]
    assert Shard(2).is_shard(2)
    assert not Shard(2).is_shard(0)
    assert Partial("avg").is_partial("mean")
    assert not Partial("avg").is_partial("sum")


def test_chunks_are_those_of_the_documented_examples() -> None:
    assert [chunk_sizes(n, 4) for n in (10, 5, 2, 0)] == [
        (3, 3, 3, 1),
        (2, 2, 1, 0),
        (1, 1, 0, 0),
        (0, 0, 0, 0),
    ]


@given(st.integers(0, 200), st.integers(1, 40))
def test_chunks_follow_each_other_and_hold_everything(n: int, num_chunks: int) -> None:
    sizes = chunk_sizes(n, num_chunks)
    assert sum(sizes) == n
    assert max(sizes) == min(n, chunk_length(n, num_chunks))
    assert list(sizes) == sorted(sizes, reverse=True)
    for index, size in enumerate(sizes):
        assert chunk_offset(n, num_chunks, index) == sum(sizes[:index])
        assert chunk_size(n, num_chunks, index) == size


@pytest.mark.parametrize(
    ("n", "num", "index", "text"),
    [(-1, 2, 0, "cannot cut -1"), (3, 0, 0, "into 0 chunks"), (3, 2, 2, "no chunk 2")],
)
def test_impossible_chunks_are_refused(n: int, num: int, index: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        chunk_size(n, num, index)


@pytest.mark.parametrize("size", range(10))
@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (2, 3), (3, 2)])
def test_pieces_tile_the_whole_also_with_two_cuts_of_one_dim(size: int, mesh: tuple[int, ...]) -> None:
    shape = (size, 3)
    choices: list[Placement] = [Shard(0), Shard(1)]
    for placements in itertools.product(choices, repeat=len(mesh)):
        covered = np.zeros(shape, int)
        for coordinate in itertools.product(*map(range, mesh)):
            sizes, offsets = local_block(shape, placements, mesh, coordinate)
            covered[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
        assert (covered == 1).all()


def test_the_left_mesh_dim_makes_the_outer_cut() -> None:
    blocks = [
        local_block((8,), [Shard(0), Shard(0)], (2, 2), c)[1] for c in itertools.product((0, 1), (0, 1))
    ]
    assert blocks == [(0,), (2,), (4,), (6,)]
    uneven = [
        local_block((5,), [Shard(0), Shard(0)], (2, 2), c)[0] for c in itertools.product((0, 1), (0, 1))
    ]
    assert uneven == [(2,), (1,), (1,), (1,)]


def test_specs_are_one_object_per_request_and_hang_on_their_mesh() -> None:
    mesh = CheckerMesh((2,), (1,))
    spec = make_spec(mesh, [Shard(-1)], (4, 5))
    assert make_spec(mesh, [Shard(1)], (4, 5)) is spec
    assert spec.placements == (Shard(1),)
    assert (spec.local_shape, spec.local_offset) == ((4, 2), (0, 3))
    assert make_spec(CheckerMesh((2,), (1,)), [Shard(1)], (4, 5)) is not spec


def test_gradients_lie_like_shards_and_replicas_and_whole_for_sums() -> None:
    mesh = CheckerMesh((2,), (0,))
    lies = {
        p: make_spec(mesh, [p], (4,)).grad.placements[0]
        for p in (Shard(0), Replicate(), Partial(), Partial("avg"))
    }
    # An average of w ranks passes 1/w of the gradient to each: that is a sum.
    assert lies == {
        Shard(0): Shard(0),
        Replicate(): Replicate(),
        Partial(): Replicate(),
        Partial("avg"): Partial(),
    }


WRONG = {
    "a word": (lambda m: make_spec(m, ["dp"], (4,)), "'dp' is no placement of hp_dtensor; give Shard"),
    "not a list": (lambda m: make_spec(m, Shard(0), (4,)), r"got Shard\(0\); write \[Shard\(0\)\]"),  # type: ignore[arg-type]
    "too many": (
        lambda m: make_spec(m, [Shard(0), Replicate()], (4,)),
        r"got 2 placements .* mesh of shape \(2,\)",
    ),
    "no such dim": (
        lambda m: make_spec(m, [Shard(2)], (4, 4)),
        r"Shard\(2\) does not fit a tensor with 2 dims: it has dims -2 to 1",
    ),
    "a scalar": (lambda m: make_spec(m, [Shard(0)], ()), "no dim to cut, use Replicate"),
    "a reduction that is not built": (
        lambda m: Partial("max"),
        "takes 'sum' or 'avg', got 'max'; for another reduction call all_reduce",
    ),
    "a dim that is no number": (lambda m: Shard("0"), "takes a tensor dim as an int, got '0'"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_placements_are_refused(case: str) -> None:
    call, text = WRONG[case]
    with pytest.raises(ValueError, match=text):
        call(CheckerMesh((2,), (0,)))


def test_a_rank_outside_of_the_mesh_holds_nothing() -> None:
    with pytest.raises(RuntimeError, match="this rank is not in the mesh"):
        make_spec(CheckerMesh((2,), None), [Replicate()], (4,))  # type: ignore[arg-type]
