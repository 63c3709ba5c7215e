"""Any layout on any number of ranks loads into any other: on workers, and as a property of plans without processes."""

import itertools
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_dtensor import Replicate, Shard, distribute_tensor, load, save
from hp_dtensor.checkpoint import safetensors_file
from hp_dtensor.checkpoint.agreement import State, Tensor
from hp_dtensor.checkpoint.boxes import Box, boxes_of_run, overlap, whole, without_contained
from hp_dtensor.checkpoint.plan import file_name, make_plan
from hp_dtensor.checkpoint.stored import Chunk, Stored, StoredTensor
from hp_dtensor.placements import RaggedShard, StridedShard
from hp_dtensor.spec import local_block
from hp_platform import DeviceMesh, is_initialized
from hp_platform.testing import World, count_collectives, distributed

S0, S1, R = Shard(0), Shard(1), Replicate()
SHAPES = [(6, 4), (7, 5), (1, 3), (2, 1), (0, 3)]


def _full(world: World, shape: tuple[int, ...]) -> Any:
    numbers = [float(n) for n in range(1, 1 + math.prod(shape))]
    return world.platform.reshape(world.platform.tensor(numbers, "float32", world.device), shape)


def _layouts(world: World) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Name -> mesh ranks and placements, on the ranks that are in the mesh: lines of all and of fewer ranks, and a grid."""
    meshes: list[Any] = [list(range(size)) for size in range(1, world.size + 1)]
    if world.size == 4:
        meshes.append([[0, 1], [2, 3]])
    found = {}
    for ranks in meshes:
        ndim = np.ndim(ranks)
        mesh = DeviceMesh(world.device_type, ranks)
        if world.rank in np.ravel(ranks):
            for placements in itertools.product((S0, S1, R), repeat=ndim):
                found[f"{ranks} {placements}"] = (mesh, placements)
    return found


def _state(world: World, layout: tuple[Any, tuple[Any, ...]], sign: float = 1.0) -> dict[str, Any]:
    return {str(shape): distribute_tensor(_full(world, shape) * sign, *layout) for shape in SHAPES}


def _bits(world: World, x: Any) -> Any:
    return world.platform.to_bits(x.to_local())


@distributed(world_size=(1, 2, 4), timeout=120)
def test_every_layout_loads_into_every_other_exactly(tmp_path: Path, world: World) -> None:
    layouts = _layouts(world)
    state = {name: _state(world, layout) for name, layout in layouts.items()}
    # Ranks outside of a mesh have no such tensors: states differ, as those of a pipeline's stages do.
    save(state, tmp_path)
    for target in layouts.values():
        wanted = _state(world, target)
        mine = {name: _state(world, target, -1.0) for name in layouts}
        report = load(mine, tmp_path, strict=False)
        assert (report.missing, report.mismatched) == ((), ())
        for source, shape in itertools.product(mine, wanted):
            assert _bits(world, mine[source][shape]).tobytes() == _bits(world, wanted[shape]).tobytes(), (
                f"{shape} from {source} to {target}"
            )
        made = load(tmp_path, like=lambda name, shape, wanted=wanted: wanted[name.split("/")[-1]])
        for source, shape in itertools.product(layouts, wanted):
            assert made[source][shape].placements == wanted[shape].placements
            assert _bits(world, made[source][shape]).tobytes() == _bits(world, wanted[shape]).tobytes()


@distributed(world_size=(1, 2, 4))
def test_the_whole_is_read_by_one_process_as_plain_tensors(tmp_path: Path, world: World) -> None:
    mesh = DeviceMesh(world.device_type, list(range(world.size)))
    save({"a": [_state(world, (mesh, (S1,))), 3]}, tmp_path)
    tensors, number = load(tmp_path)["a"]
    assert number == 3
    for shape in SHAPES:
        x = tensors[str(shape)]
        assert isinstance(x, world.platform.Tensor)
        assert (world.platform.device_of(x), tuple(x.shape)) == ("cpu", shape)
        assert world.platform.to_bits(x).tobytes() == world.platform.to_bits(_full(world, shape)).tobytes()


@distributed(world_size=(1, 2, 4))
def test_a_save_costs_one_small_all_gather_and_a_load_none(tmp_path: Path, world: World) -> None:
    mesh = DeviceMesh(world.device_type, list(range(world.size)))
    state = {**_state(world, (mesh, (S0,))), "plain": _full(world, (3, 2)), "step": 1}
    with count_collectives() as counted:
        save(state, tmp_path)
    counted.assert_counts(all_gather=int(world.size > 1))
    assert counted.nbytes() <= 16 * world.size
    with count_collectives() as counted:
        load(state, tmp_path)
    counted.assert_counts()


@distributed(world_size=(2, 4))
def test_what_several_ranks_hold_is_written_once_and_dealt_evenly(tmp_path: Path, world: World) -> None:
    mesh = DeviceMesh(world.device_type, list(range(world.size)))
    count = 4 * world.size
    state = {f"w{i}": distribute_tensor(_full(world, (8, 8)), mesh, [R]) for i in range(count)}
    folder = save({**state, "plain": _full(world, (1,))}, tmp_path)
    files = [safetensors_file.TensorFile(folder / file_name(rank)) for rank in range(world.size)]
    keys = [key for file in files for key in file.entries]
    assert sorted(keys) == sorted([*state, "plain"])
    assert all(len(file.entries.keys() & state.keys()) == 4 for file in files)


@distributed(world_size=(2, 4))
def test_strided_pieces_and_runs_of_elements_load_into_each_other(tmp_path: Path, world: World) -> None:
    line = DeviceMesh(world.device_type, list(range(world.size)))
    grid = DeviceMesh(world.device_type, [[0, 1], [2, 3]] if world.size == 4 else [[0], [1]])
    columns = grid.shape[1]
    units = (1, 5, 0, 4) if world.size == 4 else (7, 3)
    full = world.platform.reshape(world.platform.arange(1, 61, "float32", world.device), (6, 5, 2))
    layouts = {
        "strided": (grid, [StridedShard(0, columns), S0] if columns > 1 else [S0, S0]),
        "run of rows": (line, [RaggedShard((0, 1), units)]),
        "block": (line, [S1]),
    }

    def state(factor: int) -> dict[str, Any]:
        return {name: distribute_tensor(full * factor, *layout) for name, layout in layouts.items()}

    save(state(1), tmp_path)
    for layout in layouts.values():
        wanted = distribute_tensor(full, *layout)
        mine = {name: distribute_tensor(full * 0, *layout) for name in layouts}
        assert load(mine, tmp_path).is_exact
        for name, x in mine.items():
            assert _bits(world, x).tobytes() == _bits(world, wanted).tobytes(), (name, layout)
        for name, x in load(tmp_path, like=lambda name, shape, wanted=wanted: wanted).items():
            assert _bits(world, x).tobytes() == _bits(world, wanted).tobytes(), (name, layout)
    for x in load(tmp_path).values():
        assert world.platform.to_bits(x).tobytes() == world.platform.to_bits(full).tobytes()


@distributed(world_size=2, init=False)
def test_a_save_may_be_the_first_that_communicates(tmp_path: Path, world: World) -> None:
    mesh = DeviceMesh(world.device_type, [0, 1])  # makes its groups when it first needs them
    folder = save({"w": distribute_tensor(_full(world, (6, 4)), mesh, [S0])}, tmp_path)
    assert len(list(folder.glob("rank-*.safetensors"))) == 2
    assert is_initialized()


# ------------------------------------------------------------------------------------------- plans, without any process
@st.composite
def _layouts_of(draw: Any, ndim: int) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    mesh = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 3)]))
    placements = st.sampled_from([R, *(Shard(dim) for dim in range(ndim))])
    return mesh, tuple(draw(placements) for _ in mesh)


def _boxes(shape: tuple[int, ...], layout: Any) -> dict[Box, list[int]]:
    mesh, placements = layout
    found: dict[Box, list[int]] = {}
    for rank, coordinate in enumerate(itertools.product(*map(range, mesh))):
        size, offset = local_block(shape, placements, mesh, coordinate)
        found.setdefault(Box(offset, size), []).append(rank)
    return found


@pytest.mark.once
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_two_layouts_of_any_shape_meet_in_the_files(data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=3)))
    sources = data.draw(st.lists(_layouts_of(len(shape)), min_size=1, max_size=3))
    target = data.draw(_layouts_of(len(shape)))
    full = np.arange(math.prod(shape), dtype="u4").reshape(shape)
    names = [f"w{i}" for i in range(len(sources))]
    state = State("dict", names, tensors={
        name: Tensor("U32", shape, _boxes(shape, layout)) for name, layout in zip(names, sources, strict=True)
    })  # fmt: skip
    plan = make_plan(state, 6)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rank, entries in enumerate(plan.files):
            boxes = [plan.pieces[rank][entry.key].box for entry in entries]
            pieces = [[np.ascontiguousarray(full[box.slices_in(whole(shape))])] for box in boxes]
            safetensors_file.write(folder / file_name(rank), entries, pieces)
        index = plan.index["entries"]
        tensors = {}
        for name in names:
            chunks = [
                Chunk(c["file"], c["key"], Box(tuple(c["offset"]), tuple(c["size"])))
                for c in index[name]["chunks"]
            ]
            assert sum(chunk.box.volume for chunk in chunks) == full.size
            tensors[name] = StoredTensor("U32", shape, tuple(chunks))
        stored = Stored(folder, tensors, sizes=plan.index["files"])
        for name, box in itertools.product(names, _boxes(shape, target)):
            assert np.array_equal(stored.bits(name, box), full[box.slices_in(whole(shape))])


@pytest.mark.once
def test_boxes_meet_in_what_they_have_in_common() -> None:
    assert overlap(Box((0, 0), (2, 3)), Box((1, 2), (5, 5))) == Box((1, 2), (1, 1))
    assert overlap(Box((0,), (2,)), Box((2,), (2,))) is None
    assert overlap(Box((), ()), Box((), ())) == Box((), ())
    assert Box((1, 2), (1, 1)).slices_in(Box((1, 0), (2, 3))) == (slice(0, 1), slice(2, 3))
    boxes = [Box((0,), (2,)), Box((0,), (4,)), Box((4,), (2,)), Box((0,), (4,))]
    assert without_contained(boxes) == [Box((0,), (4,)), Box((4,), (2,))]


@pytest.mark.once
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_a_run_of_elements_is_boxes_that_follow_each_other(shape: list[int], data: Any) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    numbers = np.arange(count).reshape(shape)
    boxes = boxes_of_run(shape, start, stop)
    runs = [numbers[box.slices_in(whole(shape))].reshape(-1) for box in boxes]
    assert np.concatenate([*runs, np.arange(0)]).tolist() == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape)
