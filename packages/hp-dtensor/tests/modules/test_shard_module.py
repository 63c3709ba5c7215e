"""shard_module against one process: every form of the call, meshes of one and two dims, ties, hooks, functions."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_dtensor.layout import Layout
from hp_dtensor.module_tensors import is_dtensor
from hp_dtensor.sharded_module import shard_module
from hp_dtensor.sharding_plan import ShardingPlan
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from layer_programs import check, make, make_mesh, placed_input, tensor, tolerance

R, S0, S1 = Replicate(), Shard(0), Shard(1)

PARAMETERS: dict[str, Any] = {
    **{f"attention.{name}.weight": ("tp", "None") for name in "qkv"},
    **{f"attention.{name}.bias": ("tp",) for name in "qkv"},
    "self.attention.o.weight": ("None", "tp"),
    "attention.o.bias": ("None",),
    "mlp.up.weight": ("tp", "None"),
    "mlp.up.bias": ("tp",),
    "mlp.down.weight": ("None", "tp"),
    "mlp.down.bias": ("None",),
}


def _batch(mesh: Any) -> tuple[str, str, str]:
    return ("dp" if "dp" in mesh.mesh_dim_names else "None", "None", "None")


def _plan(mesh: Any) -> ShardingPlan:
    """Column-wise into the layer's parts, row-wise out of them; sums are reduced at their doors."""
    whole = _batch(mesh)
    return ShardingPlan(
        plan=PARAMETERS,
        input_plan={"input": {"x": whole}, "mlp.input": [whole, None]},
        output_plan={"attention.output": whole, "output": whole},
    )


@distributed(world_size=(1, 2, 3))
def test_a_layer_on_a_line_of_ranks(world: World) -> None:
    mesh, module = make_mesh(world), make(world)
    assert shard_module(module, mesh, _plan(mesh)) is module
    for _ in range(2):  # what the first call left must not change the second
        forward, backward = check(world, module, placed_input(world, mesh))
        if world.size > 1:
            forward.assert_counts(all_reduce=2)  # the sums behind attention and MLP
            backward.assert_counts(all_reduce=2)  # the gradients at their inputs
        else:
            forward.assert_counts()
            backward.assert_counts()
        for _, parameter in world.platform.named_parameters(module):
            world.platform.set_grad(parameter, None)


@distributed(world_size=4, backends=("torch", "cuda"))
def test_a_layer_on_a_grid(world: World) -> None:
    mesh, module = make_mesh(world, grid=True), make(world)
    shard_module(module, mesh, _plan(mesh))
    forward, backward = check(world, module, placed_input(world, mesh))
    forward.assert_counts(all_reduce=2)
    # As on a line, and each of the 12 parameters over dp; the loss is a mean over dp, whose sum nobody needed.
    backward.assert_counts(all_reduce=14)


@distributed(world_size=2)
def test_all_forms_of_the_call_do_the_same(world: World) -> None:
    mesh = make_mesh(world)
    plan = _plan(mesh)
    forward = {**(plan.input_plan or {}), **(plan.output_plan or {})}
    of_placements = {
        key: [R if "tp" not in value else Shard(value.index("tp"))] for key, value in PARAMETERS.items()
    }
    forms: dict[str, Any] = {
        "(module, mesh, plan)": lambda m: shard_module(m, mesh, plan),
        "keywords": lambda m: shard_module(model=m, device_mesh=mesh, sharding_plan=plan),
        "(module, mesh, dict)": lambda m: shard_module(
            m, mesh, {"parameter": PARAMETERS, "forward": forward}
        ),
        "placements": lambda m: shard_module(
            m, mesh, ShardingPlan(of_placements, {"input": {"x": R}}, {"output": [R]})
        ),
    }
    for name, call in forms.items():
        module = make(world)
        assert call(module) is module, name
        check(world, module, placed_input(world, mesh))
    with mesh:
        check(world, shard_module(make(world), plan), placed_input(world, mesh))
    # The mesh comes with the Layouts.
    at = Layout.from_device_mesh(mesh)
    of_layouts = {key: at(*value) for key, value in PARAMETERS.items()}
    doors = {"input": at("None", "None", "None"), "output": at(R)}
    module = shard_module(make(world), {"parameter": of_layouts, "forward": doors})
    check(world, module, placed_input(world, mesh))


@distributed(world_size=(2, 3))
def test_parameters_hold_this_ranks_slice_of_their_own_values(world: World) -> None:
    mesh, module = make_mesh(world), make(world)
    before = dict(world.platform.named_parameters(make(world)))
    names = list(before)
    shard_module(module, mesh, _plan(mesh))
    after = dict(world.platform.named_parameters(module))
    assert list(after) == names
    assert after["mlp.up.weight"].placements == (S0,)
    assert all(world.platform.is_parameter(x) and x.is_leaf and x.requires_grad for x in after.values())
    assert_parity(after, before, exact=True)


@distributed(world_size=4, backends=("torch", "cuda"))
def test_cuts_of_one_dim_over_two_mesh_dims_in_either_order(world: World) -> None:
    for names in (("dp", "tp"), ("tp", "dp")):
        mesh, module = make_mesh(world, grid=True), make(world, "MLP")
        plan = {
            "up.weight": (names, "None"),
            "up.bias": (names,),
            "down.weight": ("None", names),
            "down.bias": ("None",),
        }
        shard_module(module, mesh, ShardingPlan(plan))
        check(world, module, placed_input(world, mesh), "MLP")


@distributed(world_size=2)
def test_a_frozen_parameter_stays_frozen_and_unnamed_ones_stay_plain(world: World) -> None:
    module = make(world, "MLP")
    world.platform.set_requires_grad_(module.up.weight, False)
    shard_module(module, make_mesh(world), ShardingPlan({"up.weight": [S0]}))
    assert not module.up.weight.requires_grad
    assert module.up.weight.placements == (S0,)
    assert not hasattr(module.up.bias, "placements")


@pytest.mark.parametrize("named", ["first", "last", "both"])
@distributed(world_size=(2, 3))
def test_a_tied_weight_stays_one_parameter(named: str, world: World) -> None:
    mesh, module = make_mesh(world), make(world, "Tied")
    places = ("first", "last") if named == "both" else (named,)
    plan = {f"{place}.weight": [S0] for place in places}
    shard_module(module, mesh, ShardingPlan({**plan, "first.bias": [S0], "last.bias": [S0]}))
    assert module.first.weight is module.last.weight
    check(world, module, placed_input(world, mesh), "Tied")


@distributed(world_size=2)
def test_a_copy_of_the_module_has_hooks_and_parameters_of_its_own(world: World) -> None:
    mesh, module = make_mesh(world), make(world)
    shard_module(module, mesh, _plan(mesh))
    twin = copy.deepcopy(module)
    assert twin.mlp.up.weight is not module.mlp.up.weight
    forward, _ = check(world, twin, placed_input(world, mesh))
    forward.assert_counts(all_reduce=2)
    assert module.mlp.up.weight.grad is None


@distributed(world_size=2)
def test_a_second_plan_is_refused_and_changes_nothing(world: World) -> None:
    mesh, module = make_mesh(world), make(world)
    shard_module(module, mesh, ShardingPlan(input_plan={"mlp.input": [R]}))
    with pytest.raises(RuntimeError, match="the input of 'mlp' is planned already"):
        shard_module(module, mesh, ShardingPlan({"mlp.up.weight": [S0]}, {"mlp.input": [S0]}))
    assert not hasattr(module.mlp.up.weight, "placements")
    # Other doors and parameters may still be planned.
    shard_module(module.mlp, mesh, ShardingPlan({"up.weight": [S0]}, output_plan={"output": [R]}))
    assert module.mlp.up.weight.placements == (S0,)


@distributed(world_size=(1, 2))
def test_results_are_localized_after_they_are_redistributed(world: World) -> None:
    mesh, p = make_mesh(world), world.platform

    class Two(p.Module):
        def forward(self, x: Any, y: Any) -> Any:
            return {"sum": [x.sum(0), None], "y": (y, 7)}

    module = shard_module(
        Two(), mesh, ShardingPlan(output_plan={"output": {"y": [S0]}}, return_local_tensor=[])
    )
    x, y = (distribute_tensor(tensor(world, 4, 3), mesh, [R]) for _ in range(2))
    assert module(x, y)["y"][0].placements == ((S0,) if world.size > 1 else (R,))
    local = shard_module(
        Two(), mesh, ShardingPlan(output_plan={"output": {"y": [S0]}}, return_local_tensor=[""])
    )
    result = local(x, y)
    assert not any(hasattr(t, "placements") for t in (result["sum"][0], result["y"][0]))
    assert tuple(result["y"][0].shape) == (4 // world.size, 3)
    assert (result["sum"][1], result["y"][1]) == (None, 7)


@distributed(world_size=2)
def test_arguments_are_found_by_position_and_by_name(world: World) -> None:
    mesh, p = make_mesh(world), world.platform

    class Three(p.Module):
        def forward(self, a: Any, b: Any = None, *more: Any, c: Any = None) -> Any:
            return [getattr(x, "placements", x) for x in (a, b, *more, c)]

    plain = tensor(world, 4)
    d = distribute_tensor(plain, mesh, [R])
    by_name = shard_module(Three(), mesh, ShardingPlan(input_plan={"input": {"b": [S0], "c": [S0]}}))
    assert by_name(d, d, d, c=d) == [(R,), (S0,), (R,), (S0,)]
    assert by_name(d, b=d) == [(R,), (S0,), None]
    assert by_name(d) == [(R,), None, None]
    assert by_name(d, plain)[1] is plain
    by_position = shard_module(Three(), mesh, ShardingPlan(input_plan={"input": [(S0,), None, (S0,)]}))
    assert by_position(d, d, d) == [(S0,), (R,), (S0,), None]
    assert by_position(a=d, b=d) == [(S0,), (R,), None]
    nested = shard_module(Three(), mesh, ShardingPlan(input_plan={"input": [S0]}))
    (first, none, second), *_ = nested([d, None, d])
    assert (first.placements, none, second.placements) == ((S0,), None, (S0,))


@distributed(world_size=(1, 2))
def test_a_function_is_wrapped(world: World) -> None:
    mesh = make_mesh(world)

    def total(x: Any, y: Any = 1) -> Any:
        """Adds up."""
        return (x * y).sum(0), x

    plan = ShardingPlan(input_plan={"input": [S0]}, output_plan={"output": [(R,), None]})
    placed = shard_module(total, mesh, plan)
    assert (placed.__name__, placed.__doc__) == ("total", "Adds up.")
    x = distribute_tensor(tensor(world, 5, 2), mesh, [R])
    with count_collectives() as counted:
        result, same = placed(x, y=2)
    counted.assert_counts(all_reduce=int(world.size > 1))
    assert result.placements == (R,)
    assert same.placements == ((S0,) if world.size > 1 else (R,))
    assert_parity(result, (tensor(world, 5, 2) * 2).sum(0), **tolerance(world))


@distributed(world_size=1)
def test_on_one_rank_the_model_comes_back_as_it_is(world: World) -> None:
    mesh, module = make_mesh(world), make(world)
    before = dict(world.platform.named_parameters(module))
    assert shard_module(module, mesh, _plan(mesh)) is module
    assert all(before[name] is x for name, x in world.platform.named_parameters(module))
    with pytest.raises(ValueError, match="no parameter 'mlp.up.weigth'; did you mean 'mlp.up.weight'"):
        shard_module(module, mesh, ShardingPlan({"mlp.up.weigth": [S0]}))


@distributed(world_size=2)
def test_a_summand_is_not_handed_out_alone(world: World) -> None:
    mesh = make_mesh(world)
    placed = shard_module(lambda x: x.sum(0), mesh, ShardingPlan(return_local_tensor=[""]))
    with pytest.raises(ValueError, match=r"it is \(Partial\('sum'\),\).*give it a spec in output_plan"):
        placed(distribute_tensor(tensor(world, 4), mesh, [S0]))


@distributed(world_size=(1, 2))
def test_a_plan_without_any_entry_warns_and_changes_nothing(world: World) -> None:
    mesh = make_mesh(world)
    for plan in ({}, {"parameter": {}}, {"forward": {}}, ShardingPlan(), ShardingPlan({}, {}, {}, [])):
        module = make(world, "MLP")
        with pytest.warns(
            UserWarning, match="a plan without any entry, so nothing is laid out: name parameters"
        ):
            assert shard_module(module, mesh, plan) is module
        assert not any(is_dtensor(p) for _, p in world.platform.named_parameters(module))
    # One entry is none too few: each kind of it is honoured alone.
    module = shard_module(make(world, "MLP"), mesh, {"parameter": {"up.weight": [S0]}})
    placed = [name for name, p in world.platform.named_parameters(module) if is_dtensor(p)]
    assert placed == (["up.weight"] if world.size > 1 else [])
