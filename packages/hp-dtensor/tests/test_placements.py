"""Placements as values, the chunk rule, and where pieces lie; no processes."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_dtensor import Partial, Placement, Replicate, Shard
from hp_dtensor.chunk import chunk_length, chunk_offset, chunk_size, chunk_sizes
from hp_dtensor.cuts import stacks_of, with_stacks
from hp_dtensor.placements import RaggedShard, StridedShard
from hp_dtensor.planning import Step, plan_moves
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


@pytest.mark.parametrize("size", range(10))
def test_every_cut_order_tiles_the_whole_and_has_one_notation(size: int) -> None:
    for mesh in ((2, 2), (2, 3), (3, 2), (2, 1, 2), (2, 2, 2)):
        seen = set()
        for count in range(len(mesh) + 1):
            for stack in itertools.permutations(range(len(mesh)), count):
                placements = with_stacks([Replicate()] * len(mesh), [stack], mesh)
                blocks = [
                    local_block((size,), placements, mesh, c) for c in itertools.product(*map(range, mesh))
                ]
                covered = np.zeros(size, int)
                for (n,), (start,) in blocks:
                    covered[start : start + n] += 1
                copies = np.prod([n for i, n in enumerate(mesh) if i not in stack], dtype=int)
                assert (covered == copies).all()
                again = with_stacks(placements, stacks_of(placements, mesh, 1), mesh)
                assert again == placements
                seen.add(placements)
        if 1 not in mesh:
            assert len(seen) == sum(
                len(list(itertools.permutations(range(len(mesh)), n))) for n in range(len(mesh) + 1)
            )


def test_a_strided_shard_cuts_inside_of_the_mesh_dims_that_its_factor_counts() -> None:
    def starts(placements: list[Placement]) -> list[int]:
        return [
            local_block((8,), placements, (2, 2, 2), c)[1][0] for c in itertools.product((0, 1), repeat=3)
        ]

    assert starts([StridedShard(0, 4), Shard(0), Shard(0)]) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert starts([StridedShard(0, 2), Shard(0), Shard(0)]) == [0, 1, 4, 5, 2, 3, 6, 7]
    # Mesh dim 2 outermost, then 0, then 1.
    assert starts([StridedShard(0, 2), StridedShard(0, 2), Shard(0)]) == [0, 4, 1, 5, 2, 6, 3, 7]


def test_a_factor_of_one_is_a_plain_shard() -> None:
    mesh = CheckerMesh((2, 1), (0, 0))
    assert make_spec(mesh, [StridedShard(-1, 1), Shard(0)], (4,)) is make_spec(
        mesh, [Shard(0), Shard(0)], (4,)
    )


PLACEMENT = st.sampled_from(
    [Shard(0), Shard(1), Replicate(), *(Partial(op) for op in ("sum", "avg", "max", "min", "prod"))]
)


@st.composite
def _ways(draw: st.DrawFn, mesh: tuple[int, ...]) -> tuple[Placement, ...]:
    placements = [draw(PLACEMENT) for _ in mesh]
    stacks: list[list[int]] = [[], []]
    for i in draw(st.permutations(range(len(mesh)))):
        if isinstance(placements[i], Shard):
            stacks[placements[i].dim].append(i)
    return with_stacks(placements, [tuple(stack) for stack in stacks], mesh)


@st.composite
def _pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Placement, ...], tuple[Placement, ...]]:
    mesh = draw(st.sampled_from([(2,), (3,), (2, 2), (1, 3), (4, 1), (2, 1, 2)]))
    return mesh, draw(_ways(mesh)), draw(_ways(mesh))


@given(_pairs())
def test_plans_arrive_and_touch_only_innermost_cuts(
    pair: tuple[tuple[int, ...], tuple[Placement, ...], tuple[Placement, ...]],
) -> None:
    mesh, source, target = pair
    at = tuple(Replicate() if n == 1 else p for p, n in zip(source, mesh, strict=True))
    for move in plan_moves(source, target, mesh, (8, 6)):
        assert move.before == at
        before, after = (stacks_of(p, mesh, 2) for p in (move.before, move.after))
        if move.step is not Step.EXCHANGE:
            for cut, stacks in ((move.source, before), (move.target, after)):
                assert not isinstance(cut, Shard) or stacks[cut.dim][-1] == move.mesh_dim
            changed = [i for i in range(len(mesh)) if move.before[i] != move.after[i]]
            assert changed == [move.mesh_dim]
        at = move.after
    assert at == tuple(Replicate() if n == 1 else p for p, n in zip(target, mesh, strict=True))


PLANS = {
    "a gather": ((2,), (Shard(0),), (Replicate(),), [Step.ALL_GATHER]),
    "an outer cut leaves": (
        (2, 2),
        (Shard(0), Shard(0)),
        (Replicate(), Shard(0)),
        [Step.EXCHANGE],  # every rank lacks half of what it wants; three steps would move more
    ),
    "the cut order turns": ((2, 2), (Shard(0), Shard(0)), (StridedShard(0, 2), Shard(0)), [Step.EXCHANGE]),
    "a sum is scattered": ((2,), (Partial(),), (Shard(1),), [Step.REDUCE_SCATTER]),
    "slices come before the reduction": (
        (2, 2),
        (Replicate(), Partial()),
        (Shard(0), Replicate()),
        [Step.SLICE, Step.ALL_REDUCE],
    ),
    "sums and averages are scaled": ((2,), (Partial("avg"),), (Partial(),), [Step.SCALE]),
    "another reduction is made after the first": (
        (2,),
        (Partial("max"),),
        (Partial(),),
        [Step.ALL_REDUCE, Step.TO_PARTIAL],
    ),
    "the inner of two kinds reduces first": (
        (2, 2),
        (Partial("max"), Partial()),
        (Replicate(), Partial()),
        [Step.ALL_REDUCE, Step.ALL_REDUCE, Step.TO_PARTIAL],
    ),
}


@pytest.mark.parametrize("case", PLANS)
def test_plans_are_the_cheapest(case: str) -> None:
    mesh, source, target, steps = PLANS[case]
    assert [move.step for move in plan_moves(source, target, mesh, (8, 8))] == steps


def test_maxima_reduce_from_the_right_only_where_ties_share_a_gradient() -> None:
    ends = (Partial("max"), Partial("max")), (Shard(0), Shard(0))
    steps = {
        is_recorded: [
            (m.mesh_dim, m.step) for m in plan_moves(*ends, (2, 2), (8, 8), is_recorded=is_recorded)
        ]
        for is_recorded in (True, False)
    }
    assert steps[False] == [(0, Step.REDUCE_SCATTER), (1, Step.REDUCE_SCATTER)]
    assert steps[True] == [(1, Step.ALL_REDUCE), (0, Step.REDUCE_SCATTER), (1, Step.SLICE)]


def test_specs_are_one_object_per_request_and_hang_on_their_mesh() -> None:
    mesh = CheckerMesh((2,), (1,))
    spec = make_spec(mesh, [Shard(-1)], (4, 5))
    assert make_spec(mesh, [Shard(1)], (4, 5)) is spec
    assert spec.placements == (Shard(1),)
    assert (spec.local_shape, spec.local_offset) == ((4, 2), (0, 3))
    assert make_spec(CheckerMesh((2,), (1,)), [Shard(1)], (4, 5)) is not spec


def test_two_threads_that_make_one_spec_at_once_get_one_object() -> None:
    class FoundLate(dict):  # type: ignore[type-arg]
        """To each thread the entry is missing when it looks."""

        def get(self, key: object, default: object = None) -> object:
            return default

    mesh = CheckerMesh((2,), (1,))
    mesh.interned = FoundLate()
    assert make_spec(mesh, [Shard(0)], (4, 5)) is make_spec(mesh, [Shard(0)], (4, 5))


def test_gradients_lie_like_shards_and_replicas_and_whole_for_sums() -> None:
    mesh = CheckerMesh((2,), (0,))
    lies = {
        p: make_spec(mesh, [p], (4,)).grad.placements[0]
        for p in (Shard(0), Replicate(), Partial(), Partial("avg"), Partial("max"))
    }
    # An average of w ranks passes 1/w of the gradient to each: that is a sum.
    assert lies.pop(Partial("max")) == Partial()  # it goes to the rank that has the maximum
    assert lies == {
        Shard(0): Shard(0),
        Replicate(): Replicate(),
        Partial(): Replicate(),
        Partial("avg"): Partial(),
    }


WRONG = {
    "a word": (
        lambda m: make_spec(m, ["dp"], (4,)),
        r"aliases \('dp',\) are names of mesh dims, but .* has none",
    ),
    "a number": (lambda m: make_spec(m, [3], (4,)), "3 is no placement of hp_dtensor; give Shard"),  # type: ignore[list-item]
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
        lambda m: Partial("median"),
        "takes one of 'sum', 'avg', 'max', 'min', 'prod', 'all', 'any', got 'median'",
    ),
    "no number of chunks": (lambda m: StridedShard(0, 0), r"chunks that mesh dims further right .* got 0"),
    "chunks that nobody cuts": (
        lambda m: make_spec(m, [StridedShard(0, 2)], (4,)),
        r"StridedShard\(0, 2\) along mesh dim 0 does not fit: .* into 1 chunks before; give one of these",
    ),
    "units for other ranks": (
        lambda m: make_spec(m, [RaggedShard((0,), (1, 2, 3))], (6,)),
        "has 3 units for the 2 ranks along mesh dim 0; give one per rank",
    ),
    "units that do not divide": (
        lambda m: make_spec(m, [RaggedShard((0,), (1, 2))], (4, 3)),
        "the 4 cells of shape .* do not divide by the sum of the units, 3",
    ),
    "dims that do not lead": (lambda m: RaggedShard((1,), (1, 1)), r"takes the leading dims \(0, 1, ...\)"),
    "no units": (lambda m: RaggedShard((0,), (0, 0)), "none below 0 and not all 0, got"),
    "units that are no numbers": (lambda m: RaggedShard((0,), ("a",)), "takes a sequence of ints"),  # type: ignore[arg-type]
    "more dims than there are": (
        lambda m: make_spec(m, [RaggedShard((0, 1), (1, 1))], (4,)),
        "flattens 2 dims, but the tensor has 1",
    ),
    "a run where a block is asked for": (
        lambda m: local_block((4,), [RaggedShard((0,), (1, 1))], (2,), (0,)),
        "is a run of elements, not a block",
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
