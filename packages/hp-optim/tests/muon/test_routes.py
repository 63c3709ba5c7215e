"""Who holds, owns, sends and gets what: all ranks' parts together, without processes, for drawn layouts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_dtensor.placements import Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.spec import make_spec
from hp_optim.muon.batches import Batch, Lane, batches_of
from hp_optim.muon.matrices import matrices_of
from hp_optim.muon.owners import Task, assign
from hp_optim.muon.parts import Box, Held, Piece, Sharing, alone, run_boxes, sharing_of
from hp_optim.muon.routes import Cut, Place
from hp_platform import DeviceMesh

pytestmark = pytest.mark.once

LANE = {"kept": "float32", "sent": "float32", "computed": "float32", "device": "cpu", "storage": "cpu"}


def mesh_of(shape: tuple[int, ...], rank: int) -> DeviceMesh:
    ranks = np.arange(math.prod(shape)).reshape(shape).tolist()
    return DeviceMesh("cpu", ranks, _rank=rank)


def tasks_on(mesh: Any, parameters: list[tuple[tuple[int, ...], tuple[Placement, ...], Any]]) -> list[Task]:
    found = []
    for position, (shape, placements, rule) in enumerate(parameters):
        spec = make_spec(mesh, placements, shape)
        for matrix in matrices_of(shape, rule):
            box = Box(matrix.offset, matrix.size)
            found.append(Task(position, box, matrix.rows, matrix.cols, None, sharing_of(spec, box)))
    return found


def local_of(whole: np.ndarray, mesh: Any, placements: tuple[Placement, ...]) -> np.ndarray:
    spec = make_spec(mesh, placements, whole.shape)
    if any(isinstance(p, RaggedShard) for p in placements):
        return whole.reshape(-1)[spec.local_offset[0] : spec.local_offset[0] + spec.local_shape[0]]
    return whole[tuple(slice(o, o + n) for o, n in zip(spec.local_offset, spec.local_shape, strict=True))]


def cut_from(local: np.ndarray, cut: Cut) -> np.ndarray:
    if cut.held.start is not None:
        local = local[cut.held.start : cut.held.start + cut.held.box.volume].reshape(cut.held.box.size)
    return local[tuple(slice(o, o + n) for o, n in zip(cut.box.offset, cut.box.size, strict=True))]


def in_place(matrix: np.ndarray, place: Place) -> np.ndarray:
    return matrix[tuple(slice(o, o + n) for o, n in zip(place.box.offset, place.box.size, strict=True))]


def sent_rows(values: list[np.ndarray], sizes: tuple[int, ...]) -> list[np.ndarray]:
    """What goes to each rank."""
    row = np.concatenate([np.empty(0), *(x.reshape(-1) for x in values)])
    assert len(row) == sum(sizes)
    return np.split(row, np.cumsum(sizes)[:-1])


def simulate(mesh_shape: tuple[int, ...], parameters: list[Any], cap: int) -> None:
    """All ranks exchange by their own plans; matrices come together whole, and results reach everybody who holds them."""
    num_ranks = math.prod(mesh_shape)
    meshes = [mesh_of(mesh_shape, rank) for rank in range(num_ranks)]
    wholes = [
        np.arange(1.0, 1 + math.prod(shape)).reshape(shape) + 1000 * i
        for i, (shape, *_) in enumerate(parameters)
    ]
    locals_ = [
        [local_of(w, mesh, p) for w, (_, p, _) in zip(wholes, parameters, strict=True)] for mesh in meshes
    ]
    lane = Lane(tuple(range(num_ranks)), **LANE)
    plans: list[list[Batch]] = [
        batches_of(
            [(task, lane) for task in tasks_on(mesh, parameters)],
            [],
            {},
            rank,
            lambda task, _: task.box.volume,
            cap,
        )
        for rank, mesh in enumerate(meshes)
    ]
    done = [[np.zeros_like(x) for x in mine] for mine in locals_]
    own = [
        [batch for batch in plan if batch.lane.ranks == (rank,) and num_ranks > 1]
        for rank, plan in enumerate(plans)
    ]
    joint = [[batch for batch in plan if batch not in mine] for plan, mine in zip(plans, own, strict=True)]
    assert len({len(plan) for plan in joint}) == 1, "all ranks run as many exchanges"
    for rank, batches in enumerate(own):
        for batch in batches:
            assert not batch.route.sent
            assert not batch.route.received
            run_together({rank: batch}, wholes, locals_, done)
    for together in zip(*joint, strict=True):
        run_together(dict(enumerate(together)), wholes, locals_, done)
    for mine, results in zip(locals_, done, strict=True):
        for x, result in zip(mine, results, strict=True):
            assert np.array_equal(-x, result)
    for plan in plans:
        due = [parameter for batch in plan for parameter in batch.due]
        assert len(due) == len(set(due))


def run_together(batches: dict[int, Batch], wholes: Any, locals_: Any, done: Any) -> None:
    ranks = sorted(batches)
    rows = {
        r: sent_rows([cut_from(locals_[r][c.parameter], c) for c in b.route.sent], b.route.to_owners)
        for r, b in batches.items()
    }
    back = {}
    for at, (rank, batch) in enumerate(batches.items()):
        found = {
            task: np.full(batch.tasks[task].box.size, np.nan)
            for stack in batch.stacks
            for task in stack.tasks
        }
        arrived = [rows[r][at] for r in ranks]
        assert tuple(map(len, arrived)) == batch.route.from_senders
        stream = np.concatenate(arrived)
        for place in batch.route.arriving:
            values, stream = np.split(stream, [place.box.volume])
            in_place(found[place.task], place)[...] = values.reshape(place.box.size)
        for cut, place in batch.route.kept:
            in_place(found[place.task], place)[...] = cut_from(locals_[rank][cut.parameter], cut)
        for task, matrix in found.items():
            box = batch.tasks[task].box
            whole = wholes[batch.tasks[task].parameter]
            assert np.array_equal(
                matrix, whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))]
            )
            matrix[...] = -matrix
        back[rank] = sent_rows(
            [in_place(found[p.task], p) for p in batch.route.returned], batch.route.to_holders
        )
        for cut, place in batch.route.kept:
            cut_from(done[rank][cut.parameter], cut)[...] = in_place(found[place.task], place)
    for at, (rank, batch) in enumerate(batches.items()):
        arrived = [back[r][at] for r in ranks]
        assert tuple(map(len, arrived)) == batch.route.from_owners
        stream = np.concatenate(arrived)
        for cut in batch.route.received:
            values, stream = np.split(stream, [cut.box.volume])
            cut_from(done[rank][cut.parameter], cut)[...] = values.reshape(cut.box.size)


@st.composite
def layouts(draw: Any) -> tuple[tuple[int, ...], list[Any]]:
    mesh_shape = draw(st.sampled_from([(1,), (2,), (3,), (5,), (2, 2), (3, 2), (2, 1), (2, 2, 2)]))
    parameters = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 7), min_size=2, max_size=3)))
        placements: list[Placement] = [
            Replicate() if draw(st.booleans()) else Shard(draw(st.integers(0, len(shape) - 1)))
            for _ in mesh_shape
        ]
        if len(mesh_shape) == 2 and draw(st.booleans()):
            placements = [StridedShard(0, mesh_shape[1]), Shard(0)]
        if len(mesh_shape) == 1 and draw(st.booleans()):
            cells = math.prod(shape[:2])
            bounds = sorted(
                draw(st.lists(st.integers(0, cells), min_size=mesh_shape[0] - 1, max_size=mesh_shape[0] - 1))
            )
            units = tuple(b - a for a, b in itertools.pairwise((0, *bounds, cells)))
            placements = [RaggedShard((0, 1), units)]
        rows = shape[-2]
        rule = (
            {"rows": [1, rows - 1]}
            if rows > 1 and (len(shape) == 2 or rows != 1) and draw(st.booleans())
            else None
        )
        parameters.append((shape, tuple(placements), rule))
    return mesh_shape, parameters


@settings(max_examples=150, deadline=None)
@given(layouts(), st.sampled_from([1, 20, 10**6]))
def test_every_rank_expects_what_others_send_and_matrices_come_together(layout: Any, cap: int) -> None:
    simulate(*layout, cap)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_runs_are_boxes_in_flat_order(sizes: list[int], data: Any) -> None:
    flat = np.arange(math.prod(sizes)).reshape(sizes)
    start = data.draw(st.integers(0, flat.size))
    length = data.draw(st.integers(0, flat.size - start))
    boxes = run_boxes(sizes, start, length)
    found = [flat[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].reshape(-1) for box in boxes]
    assert np.concatenate([np.empty(0, int), *found]).tolist() == list(range(start, start + length))
    assert len(boxes) <= max(1, 2 * len(sizes) - 1)


def held_by(ranks: range, side: int) -> Task:
    """A square matrix, equal parts of which all these ranks hold."""
    pieces = {}
    for at, rank in enumerate(ranks):
        box = Box((at * side, 0), (side, side * len(ranks)))
        pieces[rank] = (Piece(box, Held(box)),)
    box = Box((0, 0), (side * len(ranks),) * 2)
    return Task(0, box, *box.size, None, Sharing(pieces, dict.fromkeys(ranks, ())))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 8))
def test_no_rank_works_longer_than_the_mean_and_one_matrix(sides: list[int], num_ranks: int) -> None:
    tasks = [held_by(range(num_ranks), side) for side in sides]
    load = [0] * num_ranks
    for task, owner in zip(tasks, assign(tasks), strict=True):
        load[owner] += task.cost
    # The last matrix of the busiest rank came when no rank had less.
    assert max(load) <= sum(load) / num_ranks + max(task.cost for task in tasks) * (1 - 1 / num_ranks)
    equal = [held_by(range(num_ranks), 3) for _ in range(4 * num_ranks)]
    assert sorted(assign(equal)) == sorted([*range(num_ranks)] * 4)


def test_what_one_rank_holds_alone_counts_as_its_work() -> None:
    alone_on_0 = [held_by(range(1), 8) for _ in range(2)]
    shared = [held_by(range(2), 4) for _ in range(3)]
    assert assign([*alone_on_0, *shared]) == [0, 0, 1, 1, 0]


def test_a_batch_holds_as_many_bytes_as_it_may_on_every_owner() -> None:
    tasks = [held_by(range(2), 2) for _ in range(10)]
    lane = Lane((0, 1), **LANE)
    # A quarter in the first one, a half in the last one.
    for cap, expected in ((1, [1] * 5), (32, [1, 2, 1, 1]), (64, [1, 2, 2]), (128, [2, 3]), (10**9, [5])):
        batches = batches_of(
            [(task, lane) for task in tasks], [], {}, 0, lambda task, _: task.box.volume, cap
        )
        assert [sum(len(stack.tasks) for stack in batch.stacks) for batch in batches] == expected


def test_the_smallest_matrices_stand_in_the_middle() -> None:
    tasks = [held_by(range(2), side) for side in (1, 4, 2, 5, 3, 1, 1)]
    lane = Lane((0, 1), **LANE)
    batches = batches_of(
        [(task, lane) for task in tasks for _ in range(2)], [], {}, 0, lambda task, _: task.box.volume, 16
    )
    assert [max(task.rows for task in batch.tasks) for batch in batches] == [10, 6, 2, 4, 8]


def test_a_plain_parameter_is_nobody_elses() -> None:
    box = Box((1, 0), (2, 3))
    sharing = alone(box, (4, 3), 5)
    assert sharing.holders == (5,)
    assert sharing.senders(5) == (5,)
    assert sharing.pieces[5][0] == Piece(box, Held(Box((0, 0), (4, 3))))
