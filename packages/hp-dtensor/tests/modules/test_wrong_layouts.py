"""A user's mistakes in laying out modules and functions, each with its message: given, expected, what to change."""

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import Partial, Replicate, Shard, distribute_tensor
from hp_dtensor.distributed_module import distribute_module
from hp_dtensor.sharded_function import custom_shard
from hp_dtensor.sharded_module import shard_module
from hp_dtensor.sharding_plan import ShardingPlan
from hp_dtensor.skip_dispatch import SkipDTensorDispatch
from hp_dtensor.styles import (
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    parallelize_module,
)
from hp_dtensor.value_and_grad import parallelize_value_and_grad
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from layer_programs import make, make_mesh, tensor

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


class Nothing(ParallelStyle):
    """Does nothing."""

    def apply(self, module: Any, device_mesh: Any) -> Any:
        return None


class Wrong:
    """Returns no module."""

    def apply(self, module: Any, device_mesh: Any) -> Any:
        return 3


def _plan(world: World, plan: Any, module: str = "MLP") -> Any:
    return shard_module(make(world, module), make_mesh(world), plan)


def _cut(world: World, *shape: int, at: Any = S0) -> Any:
    return distribute_tensor(tensor(world, *(shape or (4,))), make_mesh(world), [at])


def _leaf(world: World) -> Any:
    return world.platform.set_requires_grad_(tensor(world, 4), True)


def _other(world: World) -> DeviceMesh:
    return DeviceMesh(world.device_type, [1, 0], mesh_dim_names=("tp",))


def _double(x: Any) -> Any:
    return x * 2


def _twice_planned(world: World) -> Any:
    module = make(world, "MLP")
    plan = ShardingPlan(output_plan={"up.output": [R]})
    return shard_module(shard_module(module, make_mesh(world), plan), make_mesh(world), plan)


def _twice_distributed(world: World) -> Any:
    module = make(world, "MLP")
    return distribute_module(distribute_module(module, make_mesh(world)), make_mesh(world))


def _ambiguous_ties(world: World) -> Any:
    return _plan(world, ShardingPlan({"first.weight": [S0], "last.weight": [S1]}), "Tied")


def _grid_without_names(world: World) -> DeviceMesh:
    return init_device_mesh(world.device_type, (2, 1))


# Name -> (the call, the error's type, its text).
CALLS: dict[str, tuple[Any, type[Exception], str]] = {
    "a plan that is a list": (
        lambda w: ShardingPlan(plan=[S0]),
        TypeError,
        r"ShardingPlan\(plan=...\) takes a dict from names to specs, got \[Shard\(0\)\]",
    ),
    "names that are one string": (
        lambda w: ShardingPlan(return_local_tensor="mlp"),
        TypeError,
        r"return_local_tensor=...\) takes a list of names of sub-modules, got 'mlp'",
    ),
    "an input plan for outputs": (
        lambda w: ShardingPlan(input_plan={"mlp.output": [R]}),
        ValueError,
        "input_plan has a key 'mlp.output': it must be 'input', or the name of a sub-module and '.input'",
    ),
    "no plan": (
        lambda w: shard_module(make(w, "MLP"), make_mesh(w), [S0]),
        TypeError,
        "shard_module takes a ShardingPlan, or a dict with 'parameter' and 'forward', got",
    ),
    "parameters at the top of a dict": (
        lambda w: _plan(w, {"up.weight": [S0]}),
        ValueError,
        r"has the keys 'parameter' .* and 'forward' .*got 'up.weight'; .*ShardingPlan\(plan=...\)",
    ),
    "a dict as the plan of parameters": (
        lambda w: _plan(w, ShardingPlan({"parameter": {"up.weight": [S0]}})),
        ValueError,
        "the module has no parameter 'parameter'; it has 'up.weight'",
    ),
    "parameters by levels": (
        lambda w: _plan(w, {"parameter": {"up": {"weight": [S0]}}}),
        ValueError,
        "the module has no parameter 'up'; it has 'up.weight', 'up.bias'",
    ),
    "parameters by pattern": (
        lambda w: _plan(w, {"parameter": {"*.weight": [S0]}}),
        ValueError,
        r"the module has no parameter '\*.weight'; did you mean .*'up.weight'",
    ),
    "a parameter without its module": (
        lambda w: _plan(w, {"parameter": {"weight": [S0]}}),
        ValueError,
        "the module has no parameter 'weight'; did you mean .*'up.weight'",
    ),
    "the plural": (
        lambda w: _plan(w, {"parameters": {"up.weight": [S0]}}),
        ValueError,
        "a plan as a dict has the keys 'parameter' .* and 'forward' .*got 'parameters'",
    ),
    "a door by another name": (
        lambda w: _plan(w, {"forward": {"inputs": [R]}}),
        ValueError,
        "has a key 'inputs': it must be 'input', or the name of a sub-module and '.input'",
    ),
    "a door by levels": (
        lambda w: _plan(w, {"forward": {"up": {"input": [R]}}}),
        ValueError,
        "has a key 'up': it must be 'input', or the name of a sub-module and '.input'",
    ),
    "a parameter left alone by None": (
        lambda w: _plan(w, {"parameter": {"up.weight": None}}),
        ValueError,
        r"plan\['up.weight'\]: None does not say how a tensor lies; give one placement per mesh dim",
    ),
    "no mesh at all": (
        lambda w: shard_module(make(w, "MLP"), ShardingPlan({"up.weight": [S0]})),
        RuntimeError,
        "no mesh is current",
    ),
    "a mesh that is none": (
        lambda w: shard_module(make(w, "MLP"), "cpu", ShardingPlan()),
        ValueError,
        "device_mesh must be a hp_platform.DeviceMesh, got str",
    ),
    "a parameter misspelt": (
        lambda w: _plan(w, ShardingPlan({"up.weigth": [S0]})),
        ValueError,
        "the module has no parameter 'up.weigth'; did you mean 'up.weight'",
    ),
    "a module misspelt": (
        lambda w: _plan(w, ShardingPlan(input_plan={"dwon.input": [R]})),
        ValueError,
        r"input_plan\['dwon.input'\]: there is no sub-module 'dwon'; did you mean 'down'",
    ),
    "a mesh dim that is not there": (
        lambda w: _plan(w, ShardingPlan({"up.weight": ("dp", "None")})),
        ValueError,
        r"plan\['up.weight'\]: alias 'dp' is no mesh dim; the mesh dims are tp",
    ),
    "names for a mesh without names": (
        lambda w: shard_module(make(w, "MLP"), _grid_without_names(w), ShardingPlan({"up.weight": ("tp",)})),
        ValueError,
        r"plan\['up.weight'\]: aliases \('tp',\) are names of mesh dims, but .* has none",
    ),
    "one mesh dim twice": (
        lambda w: _plan(w, ShardingPlan({"up.weight": ("tp", "tp")})),
        ValueError,
        r"plan\['up.weight'\]: alias 'tp' is used twice in \('tp', 'tp'\)",
    ),
    "names for another number of dims": (
        lambda w: _plan(w, ShardingPlan({"up.weight": ("tp",)})),
        ValueError,
        r"plan\['up.weight'\]: names for 1 tensor dims, but the tensor of shape \(10, 12\) has 2",
    ),
    "placements and names mixed": (
        lambda w: _plan(w, ShardingPlan({"up.weight": (S0, "tp")})),
        ValueError,
        "mixes placements with names of mesh dims: use one of them",
    ),
    "placements for another mesh": (
        lambda w: _plan(w, ShardingPlan({"up.weight": [S0, R]})),
        ValueError,
        r"got 2 placements \(Shard\(0\), Replicate\(\)\) for a mesh of shape \(2,\)",
    ),
    "a dim that the parameter lacks": (
        lambda w: _plan(w, ShardingPlan({"up.bias": [S1]})),
        ValueError,
        r"plan\['up.bias'\]: Shard\(1\) does not fit a tensor with 1 dims",
    ),
    "a parameter as a sum": (
        lambda w: _plan(w, ShardingPlan({"up.bias": [P]})),
        ValueError,
        r"plan\['up.bias'\]: a parameter cannot be a sum; give Shard or Replicate",
    ),
    "a number as a spec": (
        lambda w: _plan(w, ShardingPlan({"up.bias": 0})),
        ValueError,
        r"plan\['up.bias'\]: 0 does not say how a tensor lies; give one placement per mesh dim, such as \[Shard\(0\)\]",
    ),
    "one parameter in two ways": (
        _ambiguous_ties,
        ValueError,
        "'first.weight' and 'last.weight' are one parameter, but their specs differ",
    ),
    "an argument misspelt": (
        lambda w: _plan(w, ShardingPlan(input_plan={"input": {"scael": [R]}})),
        ValueError,
        "the input of the module itself: it takes no argument 'scael'; did you mean 'scale'",
    ),
    "more specs than arguments": (
        lambda w: _plan(w, ShardingPlan(input_plan={"up.input": [(R,), (R,), None]})),
        ValueError,
        "the input of 'up': specs for 3 arguments, but it takes 1: 'x'",
    ),
    "more specs than results": (
        lambda w: shard_module(_double, make_mesh(w), ShardingPlan(output_plan={"output": [(R,), (R,)]}))(
            _cut(w)
        ),
        ValueError,
        "_double: got 1 results for 2 specs; give one per result",
    ),
    "results by name of a tensor": (
        lambda w: shard_module(_double, make_mesh(w), ShardingPlan(output_plan={"output": {"y": [R]}}))(
            _cut(w)
        ),
        ValueError,
        "specs by name are for a result that is a dict, got DTensor",
    ),
    "an argument on another mesh": (
        lambda w: shard_module(_double, _other(w), ShardingPlan(input_plan={"input": [R]}))(_cut(w)),
        ValueError,
        "argument 'x' of .*_double lies on .*, but its plan is for",
    ),
    "a second plan": (_twice_planned, RuntimeError, "the output of 'up' is planned already"),
    "parameters of a function": (
        lambda w: shard_module(_double, make_mesh(w), ShardingPlan({"w": [R]})),
        ValueError,
        "_double is a function and has no parameter 'w'",
    ),
    "a layout of a number": (
        lambda w: shard_module(3, make_mesh(w), ShardingPlan()),
        TypeError,
        "shard_module takes a module or a function, got int",
    ),
    "distributed twice": (_twice_distributed, RuntimeError, "is distributed already"),
    "a function with one argument": (
        lambda w: distribute_module(make(w, "MLP"), make_mesh(w), input_fn=_double),
        ValueError,
        r"input_fn must take \(module, inputs, mesh\), got a function with 1 arguments by position",
    ),
    "distribute a function": (
        lambda w: distribute_module(_double, make_mesh(w)),
        TypeError,
        "distribute_module takes a module, got function",
    ),
    "a pattern that meets nothing": (
        lambda w: parallelize_module(make(w), make_mesh(w), {"atention.q": Nothing()}),
        ValueError,
        r"parallelize_plan\['atention.q'\] meets no sub-module of Layer; did you mean 'attention.q'",
    ),
    "a wildcard over two levels": (
        lambda w: parallelize_module(make(w), make_mesh(w), {"*.*.q": Nothing()}),
        ValueError,
        r"parallelize_plan\['\*.\*.q'\] meets no sub-module",
    ),
    "a style that is a class": (
        lambda w: parallelize_module(make(w), make_mesh(w), {"mlp": Nothing}),
        TypeError,
        r"parallelize_plan\['mlp'\] must be a style, an object with apply\(module, device_mesh\), got <class",
    ),
    "a style for lines on a grid": (
        lambda w: parallelize_module(make(w), _grid_without_names(w), {"mlp": Nothing()}),
        ValueError,
        r"Nothing takes a mesh of 1 dim, got .* of shape \(2, 1\); slice it by name, such as mesh\['tp'\]",
    ),
    "a style that gives no module": (
        lambda w: parallelize_module(make(w), make_mesh(w), {"mlp": Wrong()}),
        TypeError,
        "Wrong.apply for 'mlp' gave a int: return the module, or None",
    ),
    "layouts without desired ones": (
        lambda w: PrepareModuleInput(input_layouts=(R, S0)),
        ValueError,
        "input_layouts has 2 entries, desired_input_layouts none: give as many of one as of the other",
    ),
    "names of keywords that differ": (
        lambda w: PrepareModuleInput(input_kwarg_layouts={"x": R}, desired_input_kwarg_layouts={"y": R}),
        ValueError,
        r"input_kwarg_layouts has the names \['x'\], desired_input_kwarg_layouts \['y'\]: they must be the same",
    ),
    "a word as a layout": (
        lambda w: PrepareModuleOutput(output_layouts=("tp",), desired_output_layouts=R),
        ValueError,
        r"output_layouts\[0\] must be a placement, a tuple with one placement per mesh dim, or None, got 'tp'",
    ),
    "no output layouts": (
        lambda w: PrepareModuleInputOutput(output_layouts=None, desired_output_layouts=None),
        ValueError,
        "output_layouts and desired_output_layouts are needed, got None",
    ),
    "a layout for a number": (
        lambda w: PrepareModuleInput(input_layouts=R, desired_input_layouts=R).apply(
            make(w, "MLP"), make_mesh(w)
        )(3),
        ValueError,
        "argument 0 of MLP has a layout, but is a int: layouts are for tensors, None leaves alone",
    ),
    "results that lie nowhere": (
        lambda w: custom_shard(_double),
        ValueError,
        "custom_shard needs out_placements: how the results lie, None if there is no tensor",
    ),
    "a spec less than arguments": (
        lambda w: custom_shard(_double, None, [S0], ([S0], [R]))(_cut(w)),
        ValueError,
        "_double got 1 positional arguments for in_placements of 2",
    ),
    "a DTensor without a spec": (
        lambda w: custom_shard(_double, None, [S0], (None,))(_cut(w)),
        TypeError,
        "argument 0 of _double is a DTensor, but its entry in in_placements is None: give it a spec",
    ),
    "a DTensor without any specs": (
        lambda w: custom_shard(_double, None, [S0])(_cut(w)),
        RuntimeError,
        "argument 0 of _double is a DTensor, but in_placements is None",
    ),
    "a spec for a number": (
        lambda w: custom_shard(lambda x, y: x * y, None, [S0], ([S0], [R]))(_cut(w), 3),
        TypeError,
        r"argument 1 of .*<lambda> has the spec \[Replicate\(\)\], but is no DTensor, int",
    ),
    "an input that lies otherwise": (
        lambda w: custom_shard(_double, None, [S0], ([S0],), False)(_cut(w, at=R)),
        ValueError,
        r"argument 0 of _double is \(Replicate\(\),\) of \(4,\) .*wants \(Shard\(0\),\): redistribute it, or let",
    ),
    "a spec less than results": (
        lambda w: custom_shard(lambda x: (x, x), None, [S0], ([S0],))(_cut(w)),
        ValueError,
        "gave 2 results for 1 out_placements: give one per result",
    ),
    "a result without a spec": (
        lambda w: custom_shard(_double, None, None, ([S0],))(_cut(w)),
        TypeError,
        "result 0 of _double is a tensor, but its entry in out_placements is None: say how it lies",
    ),
    "a spec for a result that is text": (
        lambda w: custom_shard(lambda x: "text", None, [S0], ([S0],))(_cut(w)),
        TypeError,
        r"result 0 of .* has the spec \[Shard\(0\)\], but is no tensor, str: give None",
    ),
    "a gradient that cannot lie so": (
        lambda w: custom_shard(_double, None, [S0], ([S0],), in_grad_placements=([R],))(_cut(w)),
        ValueError,
        r"the gradient of argument 0 of _double, Shard\(0\) along mesh dim 0, is Shard\(0\), not Replicate\(\)",
    ),
    "a result of another size": (
        lambda w: custom_shard(_double, None, [S0], ([S0],), out_shapes=lambda x: (6,))(_cut(w)),
        ValueError,
        r"result 0 of _double: the local tensor has shape \(2,\), but the piece of .* has shape",
    ),
    "weights that are one tensor": (
        lambda w: parallelize_value_and_grad(_double, _leaf(w)),
        TypeError,
        "weights takes a list of tensors, got",
    ),
    "a weight that is not trained": (
        lambda w: parallelize_value_and_grad(_double, [_cut(w)]),
        ValueError,
        r"weights\[0\] does not require grad: ask for it with requires_grad_\(\), or leave it out",
    ),
    "a seed for a single output": (
        lambda w: parallelize_value_and_grad(_double, [_leaf(w)], [1.0])(_leaf(w)),
        TypeError,
        "is for a function with several outputs, and this one gave a single one",
    ),
    "a seed less than outputs": (
        lambda w: parallelize_value_and_grad(lambda x: (x, x), [_leaf(w)], [1.0])(_leaf(w)),
        TypeError,
        "sens has 1 numbers, the function 2 outputs: give one per output",
    ),
    "a seed that is text": (
        lambda w: parallelize_value_and_grad(_double, [_leaf(w)], ["1"]),
        TypeError,
        r"sens takes a list with one number per output, got \['1'\]",
    ),
    "an output that depends on nothing": (
        lambda w: parallelize_value_and_grad(_double, [_leaf(w)])(tensor(w, 4)),
        ValueError,
        "output 0 shall count 1.0, but does not depend on any weight that requires grad",
    ),
    "one name not to skip": (
        lambda w: SkipDTensorDispatch("add"),
        TypeError,
        "no_skip takes a set of functions and names of operations, got 'add'",
    ),
}


@pytest.mark.parametrize("case", CALLS)
@distributed(world_size=2)
def test_wrong_call_is_refused(case: str, world: World) -> None:
    call, kind, text = CALLS[case]
    with pytest.raises(kind, match=text):
        call(world)
