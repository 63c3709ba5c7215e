"""Layouts: both notations and the way between them, without processes."""

import copy
import itertools
import pickle
from typing import Any

import pytest

from hp_dtensor import Layout, Partial, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.spec import make_spec
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, count_collectives, distributed

R = Replicate()


def _mesh(
    shape: tuple[int, ...] = (2, 2, 2), names: tuple[str, ...] = ("dp", "sp", "mp"), rank: int = 0
) -> DeviceMesh:
    count = 1
    for n in shape:
        count = count * n
    if names[-1] == "interleaved_parallel":
        count = count // shape[-1]
    return init_device_mesh("cpu", shape, names, rank_list=list(range(count)), init_backend=False, _rank=rank)


def _layout(**options: Any) -> Layout:
    return Layout.from_device_mesh(_mesh(**options))


CASES: list[tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]] = [
    (("dp", "mp"), (2, 0), (Shard(0), R, Shard(1))),
    ((("dp", "sp"), "None"), ((2, 1), -1), (Shard(0), Shard(0), R)),
    ((("sp", "dp"), "None"), ((1, 2), -1), (StridedShard(0, 2), Shard(0), R)),
    ((("mp", "dp", "sp"),), ((0, 2, 1),), (StridedShard(0, 2), StridedShard(0, 2), Shard(0))),
    (("None", "None"), (-1, -1), (R, R, R)),
    ((), (), (R, R, R)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_notations_say_the_same(case: Any) -> None:
    aliases, tensor_map, placements = case
    layout = _layout()(*aliases)
    assert (layout.aliases, layout.tensor_map, layout.placements) == (aliases, tensor_map, placements)
    assert layout.tensor_map_to_placement() == placements
    by_placements = _layout()(list(placements))
    assert by_placements.placements == placements
    assert by_placements.placement_to_tensor_map(len(aliases)) == tensor_map


def test_every_order_of_names_comes_back() -> None:
    names = ("dp", "sp", "mp")
    layout = _layout()
    for count in range(4):
        for group in itertools.permutations(names, count):
            alias = "None" if not group else group[0] if count == 1 else group
            for entries in ((alias,), (alias, "None"), ("None", alias)):
                assert layout(*entries).aliases == entries
                assert layout(*layout(*entries).placements).placements == layout(*entries).placements


def test_partial_has_its_own_place_and_survives() -> None:
    layout = _layout()("dp", "None").set_partial_by_dev_axis("mp", "max")
    assert layout.placements == (Shard(0), R, Partial("max"))
    assert layout.tensor_map_to_placement() == layout.placements
    assert (layout.get_partial_by_dev_id("mp"), layout.get_partial_by_dev_id("dp")) == ("max", None)
    assert layout.is_partial()
    assert layout.is_partial("max")
    assert not layout.reset_partial().is_partial()
    assert not layout("dp").is_partial()  # a new tensor
    assert layout.alias_placements == layout.placements


def test_layouts_are_values_and_one_object_per_mesh() -> None:
    mesh = _mesh()
    base = Layout.from_device_mesh(mesh)
    layout = base("dp", "mp")
    assert base("dp", "mp") is layout
    assert Layout.from_device_mesh(mesh)("dp", "mp") is layout
    assert base("dp", "mp").set_partial_by_dev_axis("sp", "sum") is layout.set_partial_by_dev_axis(
        "sp", "sum"
    )
    assert copy.deepcopy(layout) is layout
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert hash(pickle.loads(pickle.dumps(layout))) == hash(layout)
    assert layout != base("mp", "dp")
    assert layout.set_tensor_meta((4, 4), None, "float32").tensor_meta == ((4, 4), None, "float32")
    with pytest.raises(AttributeError, match="a Layout does not change"):
        layout.placements = ()  # type: ignore[misc]
    assert repr(layout).endswith("('dp', 'mp')")


def test_slices_their_numbers_and_shapes() -> None:
    layout = _layout()(("sp", "dp"), "None", "mp")
    assert [layout.get_dim_split_num(d) for d in range(3)] == [4, 1, 2]
    # Rank 4 is dp 1, sp 0, mp 0: sp counts most.
    assert [layout.get_split_id(0, rank) for rank in range(8)] == [0, 0, 2, 2, 1, 1, 3, 3]
    assert layout.repeat_num() == 1
    assert _layout()("dp", "None").repeat_num() == 4
    assert layout.slice_shape((8, 3, 4)) == (2, 3, 2)
    assert layout.slice_shape((9, 3, 5), rank=7) == (
        2,
        3,
        2,
    )  # ceil-sized chunks: 5, then 3 and 2 of it; 4 of 9, then 2
    assert layout.get_global_shape((2, 3, 2)) == (8, 3, 4)
    told = layout.to_dict()
    assert (told["mesh_shape"], told["alias_name"], told["tensor_map"]) == (
        (2, 2, 2),
        ("dp", "sp", "mp"),
        ((1, 2), -1, 0),
    )
    assert layout.compact_str == _layout()(("sp", "dp"), "None", "mp").compact_str
    assert layout.alias_placements == (("sp", "dp"), "None", "mp")
    assert _layout()("dp").alias_placements == (Shard(0), R, R)


def test_slices_inside_of_a_device_count_in_the_arithmetic_only() -> None:
    layout = _layout(shape=(2, 4), names=("dp", "interleaved_parallel"))
    cut = layout(("dp", "interleaved_parallel"), "None")
    assert cut.get_dim_split_num(0) == 8
    assert cut.slice_shape((16, 3)) == (2, 3)
    assert cut.repeat_num() == 1
    assert layout("None").repeat_num() == 2
    with pytest.raises(ValueError, match="slices inside of one device, so a tensor cannot be Shard"):
        make_spec(layout.mesh, cut, (16, 3))  # type: ignore[arg-type]
    assert make_spec(layout.mesh, layout("dp"), (16,)).local_shape == (8,)  # type: ignore[arg-type]


WRONG = {
    "an unknown name": (lambda x: x("tp"), "alias 'tp' is no mesh dim; the mesh dims are dp, sp, mp"),
    "a name twice": (lambda x: x("dp", "dp"), "alias 'dp' is used twice"),
    "a number": (
        lambda x: x(0, "dp"),
        "an alias is the name of a mesh dim, 'None', or a tuple of names, got 0",
    ),
    "too few placements": (lambda x: x(Shard(0)), "got 1 placements .* give one per mesh dim"),
    "a reduction over a cut": (
        lambda x: x("dp").set_partial_by_dev_axis("dp", "sum"),
        r"mesh dim 'dp' is Shard\(0\)",
    ),
    "an unknown reduction": (lambda x: x("dp").set_partial_by_dev_axis("mp", "mode"), "takes one of 'sum'"),
    "an unknown mesh dim": (lambda x: x("dp").get_partial_by_dev_id("tp"), "'tp' is no mesh dim"),
    "dims that are not known": (lambda x: x(Shard(0), R, R).tensor_map, "needs the number of tensor dims"),
    "a rank outside": (lambda x: x("dp").get_split_id(0, 9), "rank 9 is not in"),
    "a tensor of other dims": (
        lambda x: make_spec(x.mesh, x("dp"), (4, 4)),
        "is of tensors with 1 dims, the tensor has 2",
    ),
    "another mesh": (
        lambda x: make_spec(_mesh(names=("a", "b", "c")), x("dp"), (4,)),
        "is of another mesh than .* make the layout on that mesh",
    ),
    "aliases for other dims": (
        lambda x: make_spec(x.mesh, ("dp",), (4, 4)),
        "got 1 aliases .* a tensor with 2 dims",
    ),
    "names where there are none": (
        lambda x: make_spec(init_device_mesh("cpu", (2,), rank_list=[0, 1], _rank=0), ("dp",), (4,)),
        "are names of mesh dims, but the mesh of shape .* has none",
    ),
    "slices of runs": (
        lambda x: x(RaggedShard((0,), (1, 1)), R, R).slice_shape((4,)),
        "a RaggedShard has runs of elements, not slices",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_layouts_are_refused(case: str) -> None:
    call, text = WRONG[case]
    with pytest.raises(ValueError, match=text):
        call(_layout())


@distributed(world_size=2)
def test_layouts_are_taken_wherever_placements_are(world: World) -> None:
    from hp_dtensor import DTensor, distribute_tensor

    p = world.platform
    layout = Layout.from_device_mesh(init_device_mesh(world.device_type, (2,), ("tp",)))
    x = p.reshape(p.arange(0, 12), (4, 3))
    a = distribute_tensor(x, layout("tp", "None"))
    assert a.placements == (Shard(0),)
    assert distribute_tensor(x, layout.mesh, ("None", "tp")).placements == (Shard(1),)
    assert a.redistribute(layout("None", "tp")).placements == (Shard(1),)
    assert a.redistribute(placements=("None", "tp")).placements == (Shard(1),)
    b = DTensor.from_local(a.to_local(), layout("tp", "None"), shape=(4, 3))
    assert p.to_numpy(b.full_tensor()).tolist() == p.to_numpy(x).tolist()
    with count_collectives() as counted:
        assert a.redistribute(layout("tp", "None")) is a
    counted.assert_counts()
    with pytest.raises(ValueError, match="says the placements already; leave"):
        a.redistribute(layout("tp", "None"), [Shard(0)])


@distributed(world_size=4, backends=("torch", "cuda"))
def test_a_layout_makes_its_mesh(world: World) -> None:
    layout = Layout((2, 2), ("dp", "tp"))
    assert layout.mesh is Layout((2, 2), ("dp", "tp")).mesh
    assert layout.rank_list == (0, 1, 2, 3)
    assert layout.mesh is Layout((2, 2), ("dp", "tp"), range(4)).mesh
    assert (layout.mesh_shape, layout.alias_name, layout.ndim) == ((2, 2), ("dp", "tp"), None)
    assert layout() is layout()
