"""Panels and the three products for any r x c, ranks being threads of one process that exchange by a table."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_dtensor.chunk import chunk_offset, chunk_size
from hp_platform import get_platform
from hp_platform.testing import World, distributed
from hp_tp.two_dim import products
from hp_tp.two_dim.panels import COLUMNS, ROWS, block_length, panels_of, runs_of


class Line:
    """A group of threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20.0)
        self.table: dict[int, Any] = {}


class Place:
    """What panels ask of a mesh, for one thread."""

    def __init__(self, shape: tuple[int, int], lines: dict[Any, Line], at: tuple[int, int]) -> None:
        self.shape, self.at, self.lines = shape, at, lines
        self.interned: dict[Any, Any] = {}

    def get_group(self, dim: int) -> Line:
        return self.lines[dim, self.at[1 - dim]]

    def get_coordinate(self) -> tuple[int, int]:
        return self.at

    def group_positions(self, dim: int) -> tuple[int, ...]:
        return tuple(range(self.shape[dim]))


class Table:
    """In the place of :mod:`hp_dtensor.transport`."""

    @staticmethod
    def gather(x: Any, cut: Any, async_op: bool) -> Any:
        assert x.shape[0] == cut.sizes[cut.index]
        return Arrived(np.concatenate(Table._exchanged(x, cut)))

    @staticmethod
    def reduce_scatter(x: Any, cut: Any, async_op: bool) -> Any:
        total = sum(Table._exchanged(x, cut))
        start = sum(cut.sizes[: cut.index])
        return Arrived(total[start : start + cut.sizes[cut.index]])

    @staticmethod
    def _exchanged(x: Any, cut: Any) -> list[Any]:
        line = cut.group
        line.table[cut.index] = np.array(get_platform().to_numpy(x))
        line.barrier.wait()
        of_ranks = [line.table[i] for i in range(line.size)]
        line.barrier.wait()
        return of_ranks


class Arrived:
    def __init__(self, value: Any) -> None:
        self.value = value

    def wait(self) -> Any:
        return get_platform().tensor(np.ascontiguousarray(self.value))


def on_every_place(shape: tuple[int, int], run: Callable[[Place], Any]) -> dict[tuple[int, int], Any]:
    lines = {(dim, other): Line(shape[dim]) for dim in (ROWS, COLUMNS) for other in range(shape[1 - dim])}
    results: dict[tuple[int, int], Any] = {}
    errors: list[BaseException] = []

    def body(at: tuple[int, int]) -> None:
        try:
            results[at] = run(Place(shape, lines, at))
        except BaseException as error:
            errors.append(error)
            for line in lines.values():
                line.barrier.abort()

    threads = [
        threading.Thread(target=body, args=((i, j),)) for i in range(shape[0]) for j in range(shape[1])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    if errors:
        raise errors[0]
    return results


def block(x: np.ndarray, mesh: Place, cut_by: tuple[int, int]) -> np.ndarray:
    """Of a matrix whose dims are cut over these mesh dims."""
    for dim, mesh_dim in enumerate(cut_by):
        n, ranks, index = x.shape[dim], mesh.shape[mesh_dim], mesh.at[mesh_dim]
        start = chunk_offset(n, ranks, index)
        x = np.take(x, range(start, start + chunk_size(n, ranks, index)), axis=dim)
    return np.ascontiguousarray(x)


CASES = [
    # mesh, rows, P, Q, panels
    ((2, 3), 5, 12, 7, 3),
    ((3, 2), 4, 11, 6, 3),
    ((2, 3), 1, 1, 1, 1),
    ((3, 2), 2, 5, 13, 2),
    ((2, 3), 7, 24, 12, 1),
    ((3, 3), 6, 18, 9, 3),
    ((2, 4), 5, 3, 10, 4),
    ((1, 5), 3, 7, 9, 5),
    ((5, 1), 3, 7, 9, 5),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@distributed(world_size=1, backends="torch")
def test_the_three_products_are_right_on_any_mesh(world: World, case: tuple[Any, ...]) -> None:
    mesh_shape, m, p, q, num_panels = case
    random = np.random.default_rng(0)
    a, b, v = random.normal(size=(m, p)), random.normal(size=(m, q)), random.normal(size=(p, q))
    tensor = get_platform().tensor

    def run(mesh: Place) -> Any:
        panels = panels_of(mesh, p, num_panels)
        own_a, own_b, own_v = (tensor(block(x, mesh, (ROWS, COLUMNS))) for x in (a, b, v))
        found = (
            products.spread(own_a, own_v, panels),
            products.collect(own_b, own_v, panels),
            products.weigh(own_a, own_b, panels),
        )
        wanted = (a @ v, b @ v.T, a.T @ b)
        return [
            (world.platform.to_numpy(x), block(whole, mesh, (ROWS, COLUMNS)))
            for x, whole in zip(found, wanted, strict=True)
        ]

    with mock.patch.object(products, "transport", Table):
        of_places = on_every_place(mesh_shape, run)
    for at, pairs in of_places.items():
        for name, (found, wanted) in zip(("spread", "collect", "weigh"), pairs, strict=True):
            # Sums of at most 24 products of numbers near 1, in another order.
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-13, err_msg=f"{name} at {at}")


@given(
    size=st.integers(1, 200),
    shape=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    num_panels=st.integers(1, 9),
)
@settings(max_examples=200, deadline=None)
def test_both_cuts_of_the_moving_dim_give_the_same_panels(
    size: int, shape: tuple[int, int], num_panels: int
) -> None:
    length = block_length(size, shape, num_panels)
    of_sides = []
    for num_ranks in shape:
        panels = []
        for number in range(num_panels):
            indices: list[int] = []
            for rank in range(num_ranks):
                start = chunk_offset(size, num_ranks, rank)
                for first, count in runs_of(size, num_ranks, rank, length, num_panels, number):
                    assert count > 0 and first + count <= chunk_size(size, num_ranks, rank)
                    indices.extend(range(start + first, start + first + count))
            panels.append(indices)
        of_sides.append(panels)
    assert of_sides[0] == of_sides[1]
    assert all(indices == sorted(indices) for indices in of_sides[0])
    assert sorted(k for indices in of_sides[0] for k in indices) == list(range(size))


@pytest.mark.parametrize(
    ("size", "shape", "num_panels"),
    [(4096, (4, 4), 4), (4096, (2, 4), 4), (4096, (2, 3), 3), (11008, (3, 4), 4), (4097, (2, 3), 3)],
)
def test_panels_of_large_layers_are_balanced_and_made_of_few_runs(
    size: int, shape: tuple[int, int], num_panels: int
) -> None:
    length = block_length(size, shape, num_panels)
    for num_ranks in shape:
        for rank in range(num_ranks):
            runs = [
                runs_of(size, num_ranks, rank, length, num_panels, number) for number in range(num_panels)
            ]
            even = chunk_size(size, num_ranks, rank) / num_panels
            assert max(len(of_panel) for of_panel in runs) <= 20
            for of_panel in runs:
                assert abs(sum(count for _, count in of_panel) - even) <= max(1, even / 4), (rank, runs)
