"""The rows: padding lies at the end of every parameter, and nothing is lost or counted twice."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_fsdp.layout import plan_rows

sizes = st.integers(0, 18)
shapes = st.lists(st.lists(sizes, min_size=1, max_size=3).map(tuple), max_size=5)
ranks = st.integers(1, 7)


@given(shapes, ranks)
def test_slots_follow_each_other_without_gaps(shapes: list[tuple[int, ...]], num_ranks: int) -> None:
    plan = plan_rows(shapes, num_ranks)
    end = 0
    for slot, shape in zip(plan.slots, shapes, strict=True):
        assert slot.shape == shape
        assert slot.offset == end
        end = end + slot.numel
    assert plan.numel == end


@given(shapes, ranks, st.integers(0, 2))
def test_rows_put_side_by_side_give_every_parameter(
    shapes: list[tuple[int, ...]], num_ranks: int, dim: int
) -> None:
    dims = [min(dim, len(shape) - 1) for shape in shapes]
    plan = plan_rows(shapes, num_ranks, dims)
    whole = [np.arange(1, math.prod(shape) + 1).reshape(shape) for shape in shapes]
    rows = np.zeros((num_ranks, plan.numel), int)
    for rank in range(num_ranks):
        for slot, value in zip(plan.slots, whole, strict=True):
            start = slot.local_start(rank)
            indices = range(start, start + slot.local_shape(rank)[slot.dim])
            chunk = value.take(indices, slot.dim)
            assert chunk.shape == slot.local_shape(rank)
            rows[rank, slot.offset : slot.offset + chunk.size] = chunk.ravel()
    for slot, value in zip(plan.slots, whole, strict=True):
        columns = rows[:, slot.offset : slot.offset + slot.numel]
        if slot.is_leading:  # nothing moves: the parameter, followed by its padding
            padded = columns.reshape(slot.padded_shape)
            assert (padded[: slot.shape[0]] == value).all()
            assert not padded[slot.shape[0] :].any()
        chunks = [
            columns[rank, : slot.local_numel(rank)].reshape(slot.local_shape(rank))
            for rank in range(num_ranks)
        ]
        assert (np.concatenate(chunks, slot.dim) == value).all()
        assert (columns == 0).sum() == slot.padding_numel


@given(shapes, ranks)
def test_the_padding_of_all_ranks_is_less_than_one_chunk_row_per_rank(
    shapes: list[tuple[int, ...]], num_ranks: int
) -> None:
    plan = plan_rows(shapes, num_ranks)
    owned = sum(plan.numel - plan.padding_of(rank) for rank in range(num_ranks))
    assert owned == sum(math.prod(shape) for shape in shapes)
    for slot in plan.slots:
        assert 0 <= slot.padding_numel < max(1, num_ranks * math.prod(slot.shape[1:]))


def test_scalars_take_no_place_in_a_row() -> None:
    with pytest.raises(ValueError, match="a 0-d parameter has no dim to shard"):
        plan_rows([(3,), ()], 2)
