"""Wrong plans of shard_module: what was given, what was expected, what to change."""

import sys
from pathlib import Path
from typing import Any

from hp_dtensor import Partial, Replicate, Shard, distribute_tensor
from hp_dtensor.sharded_module import shard_module
from hp_dtensor.sharding_plan import ShardingPlan
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World

sys.path.insert(0, str(Path(__file__).parent))
from layer_programs import make, make_mesh, tensor

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def plan(world: World, plan: Any, module: str = "MLP") -> Any:
    return shard_module(make(world, module), make_mesh(world), plan)


def cut(world: World, *shape: int, at: Any = S0) -> Any:
    return distribute_tensor(tensor(world, *(shape or (4,))), make_mesh(world), [at])


def _other(world: World) -> DeviceMesh:
    return DeviceMesh(world.device_type, [1, 0], mesh_dim_names=("tp",))


def double(x: Any) -> Any:
    return x * 2


def _twice_planned(world: World) -> Any:
    module = make(world, "MLP")
    plan = ShardingPlan(output_plan={"up.output": [R]})
    return shard_module(shard_module(module, make_mesh(world), plan), make_mesh(world), plan)


def _ambiguous_ties(world: World) -> Any:
    return plan(world, ShardingPlan({"first.weight": [S0], "last.weight": [S1]}), "Tied")


def grid_without_names(world: World) -> DeviceMesh:
    return init_device_mesh(world.device_type, (2, 1))


# Name -> (the call, the error's type, its text).
PLANS: dict[str, tuple[Any, type[Exception], str]] = {
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
        lambda w: plan(w, {"up.weight": [S0]}),
        ValueError,
        r"has the keys 'parameter' .* and 'forward' .*got 'up.weight'; .*ShardingPlan\(plan=...\)",
    ),
    "a dict as the plan of parameters": (
        lambda w: plan(w, ShardingPlan({"parameter": {"up.weight": [S0]}})),
        ValueError,
        "the module has no parameter 'parameter'; it has 'up.weight'",
    ),
    "parameters by levels": (
        lambda w: plan(w, {"parameter": {"up": {"weight": [S0]}}}),
        ValueError,
        "the module has no parameter 'up'; it has 'up.weight', 'up.bias'",
    ),
    "parameters by pattern": (
        lambda w: plan(w, {"parameter": {"*.weight": [S0]}}),
        ValueError,
        r"the module has no parameter '\*.weight'; did you mean .*'up.weight'",
    ),
    "a parameter without its module": (
        lambda w: plan(w, {"parameter": {"weight": [S0]}}),
        ValueError,
        "the module has no parameter 'weight'; did you mean .*'up.weight'",
    ),
    "the plural": (
        lambda w: plan(w, {"parameters": {"up.weight": [S0]}}),
        ValueError,
        "a plan as a dict has the keys 'parameter' .* and 'forward' .*got 'parameters'",
    ),
    "a door by another name": (
        lambda w: plan(w, {"forward": {"inputs": [R]}}),
        ValueError,
        "has a key 'inputs': it must be 'input', or the name of a sub-module and '.input'",
    ),
    "a door by levels": (
        lambda w: plan(w, {"forward": {"up": {"input": [R]}}}),
        ValueError,
        "has a key 'up': it must be 'input', or the name of a sub-module and '.input'",
    ),
    "a parameter left alone by None": (
        lambda w: plan(w, {"parameter": {"up.weight": None}}),
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
        lambda w: plan(w, ShardingPlan({"up.weigth": [S0]})),
        ValueError,
        "the module has no parameter 'up.weigth'; did you mean 'up.weight'",
    ),
    "a module misspelt": (
        lambda w: plan(w, ShardingPlan(input_plan={"dwon.input": [R]})),
        ValueError,
        r"input_plan\['dwon.input'\]: there is no sub-module 'dwon'; did you mean 'down'",
    ),
    "a mesh dim that is not there": (
        lambda w: plan(w, ShardingPlan({"up.weight": ("dp", "None")})),
        ValueError,
        r"plan\['up.weight'\]: alias 'dp' is no mesh dim; the mesh dims are tp",
    ),
    "names for a mesh without names": (
        lambda w: shard_module(make(w, "MLP"), grid_without_names(w), ShardingPlan({"up.weight": ("tp",)})),
        ValueError,
        r"plan\['up.weight'\]: aliases \('tp',\) are names of mesh dims, but .* has none",
    ),
    "one mesh dim twice": (
        lambda w: plan(w, ShardingPlan({"up.weight": ("tp", "tp")})),
        ValueError,
        r"plan\['up.weight'\]: alias 'tp' is used twice in \('tp', 'tp'\)",
    ),
    "names for another number of dims": (
        lambda w: plan(w, ShardingPlan({"up.weight": ("tp",)})),
        ValueError,
        r"plan\['up.weight'\]: names for 1 tensor dims, but the tensor of shape \(10, 12\) has 2",
    ),
    "placements and names mixed": (
        lambda w: plan(w, ShardingPlan({"up.weight": (S0, "tp")})),
        ValueError,
        "mixes placements with names of mesh dims: use one of them",
    ),
    "placements for another mesh": (
        lambda w: plan(w, ShardingPlan({"up.weight": [S0, R]})),
        ValueError,
        r"got 2 placements \(Shard\(0\), Replicate\(\)\) for a mesh of shape \(2,\)",
    ),
    "a dim that the parameter lacks": (
        lambda w: plan(w, ShardingPlan({"up.bias": [S1]})),
        ValueError,
        r"plan\['up.bias'\]: Shard\(1\) does not fit a tensor with 1 dims",
    ),
    "a parameter as a sum": (
        lambda w: plan(w, ShardingPlan({"up.bias": [P]})),
        ValueError,
        r"plan\['up.bias'\]: a parameter cannot be a sum; give Shard or Replicate",
    ),
    "a number as a spec": (
        lambda w: plan(w, ShardingPlan({"up.bias": 0})),
        ValueError,
        r"plan\['up.bias'\]: 0 does not say how a tensor lies; give one placement per mesh dim, such as \[Shard\(0\)\]",
    ),
    "one parameter in two ways": (
        _ambiguous_ties,
        ValueError,
        "'first.weight' and 'last.weight' are one parameter, but their specs differ",
    ),
    "an argument misspelt": (
        lambda w: plan(w, ShardingPlan(input_plan={"input": {"scael": [R]}})),
        ValueError,
        "the input of the module itself: it takes no argument 'scael'; did you mean 'scale'",
    ),
    "more specs than arguments": (
        lambda w: plan(w, ShardingPlan(input_plan={"up.input": [(R,), (R,), None]})),
        ValueError,
        "the input of 'up': specs for 3 arguments, but it takes 1: 'x'",
    ),
    "more specs than results": (
        lambda w: shard_module(double, make_mesh(w), ShardingPlan(output_plan={"output": [(R,), (R,)]}))(
            cut(w)
        ),
        ValueError,
        "double: got 1 results for 2 specs; give one per result",
    ),
    "results by name of a tensor": (
        lambda w: shard_module(double, make_mesh(w), ShardingPlan(output_plan={"output": {"y": [R]}}))(
            cut(w)
        ),
        ValueError,
        "specs by name are for a result that is a dict, got DTensor",
    ),
    "an argument on another mesh": (
        lambda w: shard_module(double, _other(w), ShardingPlan(input_plan={"input": [R]}))(cut(w)),
        ValueError,
        "argument 'x' of .*double lies on .*, but its plan is for",
    ),
    "a second plan": (_twice_planned, RuntimeError, "the output of 'up' is planned already"),
    "parameters of a function": (
        lambda w: shard_module(double, make_mesh(w), ShardingPlan({"w": [R]})),
        ValueError,
        "double is a function and has no parameter 'w'",
    ),
    "a layout of a number": (
        lambda w: shard_module(3, make_mesh(w), ShardingPlan()),
        TypeError,
        "shard_module takes a module or a function, got int",
    ),
}
