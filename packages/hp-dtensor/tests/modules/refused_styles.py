"""Wrong styles, wrong calls of custom_shard and of parallelize_value_and_grad: what was given, what was expected, what to change."""

import sys
from pathlib import Path
from typing import Any

from hp_dtensor import Partial, Replicate, Shard
from hp_dtensor.distributed_module import distribute_module
from hp_dtensor.sharded_function import custom_shard
from hp_dtensor.skip_dispatch import SkipDTensorDispatch
from hp_dtensor.styles import (
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    parallelize_module,
)
from hp_dtensor.value_and_grad import parallelize_value_and_grad
from hp_platform.testing import World

sys.path.insert(0, str(Path(__file__).parent))
from layer_programs import make, make_mesh, tensor
from refused_layouts import cut, double, grid_without_names

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


class Nothing(ParallelStyle):
    """Does nothing."""

    def apply(self, module: Any, device_mesh: Any) -> Any:
        return None


class Wrong:
    """Returns no module."""

    def apply(self, module: Any, device_mesh: Any) -> Any:
        return 3


def _leaf(world: World) -> Any:
    return world.platform.set_requires_grad_(tensor(world, 4), True)


def _twice_distributed(world: World) -> Any:
    module = make(world, "MLP")
    return distribute_module(distribute_module(module, make_mesh(world)), make_mesh(world))


# Name -> (the call, the error's type, its text).
STYLES_AND_FUNCTIONS: dict[str, tuple[Any, type[Exception], str]] = {
    "distributed twice": (_twice_distributed, RuntimeError, "is distributed already"),
    "a function with one argument": (
        lambda w: distribute_module(make(w, "MLP"), make_mesh(w), input_fn=double),
        ValueError,
        r"input_fn must take \(module, inputs, mesh\), got a function with 1 arguments by position",
    ),
    "distribute a function": (
        lambda w: distribute_module(double, make_mesh(w)),
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
        lambda w: parallelize_module(make(w), grid_without_names(w), {"mlp": Nothing()}),
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
        lambda w: custom_shard(double),
        ValueError,
        "custom_shard needs out_placements: how the results lie, None if there is no tensor",
    ),
    "a spec less than arguments": (
        lambda w: custom_shard(double, None, [S0], ([S0], [R]))(cut(w)),
        ValueError,
        "double got 1 positional arguments for in_placements of 2",
    ),
    "a DTensor without a spec": (
        lambda w: custom_shard(double, None, [S0], (None,))(cut(w)),
        TypeError,
        "argument 0 of double is a DTensor, but its entry in in_placements is None: give it a spec",
    ),
    "a DTensor without any specs": (
        lambda w: custom_shard(double, None, [S0])(cut(w)),
        RuntimeError,
        "argument 0 of double is a DTensor, but in_placements is None",
    ),
    "a spec for a number": (
        lambda w: custom_shard(lambda x, y: x * y, None, [S0], ([S0], [R]))(cut(w), 3),
        TypeError,
        r"argument 1 of .*<lambda> has the spec \[Replicate\(\)\], but is no DTensor, int",
    ),
    "an input that lies otherwise": (
        lambda w: custom_shard(double, None, [S0], ([S0],), False)(cut(w, at=R)),
        ValueError,
        r"argument 0 of double is \(Replicate\(\),\) of \(4,\) .*wants \(Shard\(0\),\): redistribute it, or let",
    ),
    "a spec less than results": (
        lambda w: custom_shard(lambda x: (x, x), None, [S0], ([S0],))(cut(w)),
        ValueError,
        "gave 2 results for 1 out_placements: give one per result",
    ),
    "a result without a spec": (
        lambda w: custom_shard(double, None, None, ([S0],))(cut(w)),
        TypeError,
        "result 0 of double is a tensor, but its entry in out_placements is None: say how it lies",
    ),
    "a spec for a result that is text": (
        lambda w: custom_shard(lambda x: "text", None, [S0], ([S0],))(cut(w)),
        TypeError,
        r"result 0 of .* has the spec \[Shard\(0\)\], but is no tensor, str: give None",
    ),
    "a gradient that cannot lie so": (
        lambda w: custom_shard(double, None, [S0], ([S0],), in_grad_placements=([R],))(cut(w)),
        ValueError,
        r"the gradient of argument 0 of double, Shard\(0\) along mesh dim 0, is Shard\(0\), not Replicate\(\)",
    ),
    "a result of another size": (
        lambda w: custom_shard(double, None, [S0], ([S0],), out_shapes=lambda x: (6,))(cut(w)),
        ValueError,
        r"result 0 of double: the local tensor has shape \(2,\), but the piece of .* has shape",
    ),
    "weights that are one tensor": (
        lambda w: parallelize_value_and_grad(double, _leaf(w)),
        TypeError,
        "weights takes a list of tensors, got",
    ),
    "a weight that is not trained": (
        lambda w: parallelize_value_and_grad(double, [cut(w)]),
        ValueError,
        r"weights\[0\] does not require grad: ask for it with requires_grad_\(\), or leave it out",
    ),
    "a seed for a single output": (
        lambda w: parallelize_value_and_grad(double, [_leaf(w)], [1.0])(_leaf(w)),
        TypeError,
        "is for a function with several outputs, and this one gave a single one",
    ),
    "a seed less than outputs": (
        lambda w: parallelize_value_and_grad(lambda x: (x, x), [_leaf(w)], [1.0])(_leaf(w)),
        TypeError,
        "sens has 1 numbers, the function 2 outputs: give one per output",
    ),
    "a seed that is text": (
        lambda w: parallelize_value_and_grad(double, [_leaf(w)], ["1"]),
        TypeError,
        r"sens takes a list with one number per output, got \['1'\]",
    ),
    "an output that depends on nothing": (
        lambda w: parallelize_value_and_grad(double, [_leaf(w)])(tensor(w, 4)),
        ValueError,
        "output 0 shall count 1.0, but does not depend on any weight that requires grad",
    ),
    "one name not to skip": (
        lambda w: SkipDTensorDispatch("add"),
        TypeError,
        "no_skip takes a set of functions and names of operations, got 'add'",
    ),
}
