"""What clipping refuses, and what it says then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_optim import clip_grad_norm_, get_grad_norm
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed


def parameter(world: World, dtype: str = "float32") -> Any:
    platform = world.platform
    made = platform.parameter(platform.tensor(np.ones(3), "float32", world.device))
    platform.set_grad(made, platform.tensor(np.ones(3), "float32", world.device))
    return made


def dtensor(world: World, shape: tuple[int, ...] = (4, 2), placement: Any = None) -> Any:
    mesh = init_device_mesh(world.device_type, (world.size,))
    values = world.platform.zeros(shape, "float32", world.device)
    return distribute_tensor(values, mesh, [placement or Shard(0)])


def with_main_grad(parameter: Any, gradient: Any) -> Any:
    parameter.main_grad = gradient
    return parameter


def of_other_shape(world: World) -> Any:
    return with_main_grad(dtensor(world), dtensor(world, (2, 4)))


def whole_gradient(world: World) -> Any:
    return with_main_grad(dtensor(world), world.platform.zeros((4, 2), "float32", world.device))


def product(world: World) -> Any:
    mesh = init_device_mesh(world.device_type, (world.size,))
    local = world.platform.full((4, 2), 2.0, "float32", world.device)
    return with_main_grad(
        dtensor(world, placement=Replicate()),
        DTensor.from_local(local, mesh, [Partial("prod")], shape=(4, 2)),
    )


def of_integers(world: World) -> Any:
    return with_main_grad(parameter(world), world.platform.full((3,), 1, "int32", world.device))


def before_fully_shard(world: World) -> Any:
    made = parameter(world)
    world.platform.set_grad(made, None)
    made._hp_fsdp_successor = lambda: None
    return made


class Foreign:
    """Stands for an optimizer."""

    param_groups: tuple[()] = ()


WRONG: dict[str, tuple[Callable[[World], Any], str]] = {
    "norm_type": (
        lambda w: get_grad_norm([parameter(w)], "two"),
        "norm_type is 'two'; it is the p of a p-norm: 2.0, 1.0, any other number, 0, or 'inf' and '-inf'",
    ),
    "norm_type nan": (
        lambda w: get_grad_norm([parameter(w)], float("nan")),
        "norm_type is nan; it is the p of a p-norm",
    ),
    "norm_type none": (lambda w: clip_grad_norm_([parameter(w)], 1.0, None), "norm_type is None"),
    "negative max_norm": (
        lambda w: clip_grad_norm_([parameter(w)], -1.0),
        "max_norm is -1.0; it is a number, 0 or more, or a plain tensor of one element",
    ),
    "several max_norms": (
        lambda w: clip_grad_norm_([parameter(w)], w.platform.zeros((2,), "float32", w.device)),
        "max_norm is a tensor of shape (2,); as a tensor it has one element",
    ),
    "max_norm as a DTensor": (
        lambda w: clip_grad_norm_([parameter(w)], dtensor(w, (1,))),
        "it is a number, 0 or more, or a plain tensor of one element",
    ),
    "max_norm nan": (lambda w: clip_grad_norm_([parameter(w)], float("nan")), "max_norm is nan"),
    "max_norm text": (lambda w: clip_grad_norm_([parameter(w)], "1"), "max_norm is '1'"),
    "foreach": (lambda w: get_grad_norm([parameter(w)], foreach=1), "foreach is 1; give None, True or False"),
    "pairs": (
        lambda w: get_grad_norm([("weight", parameter(w))]),
        "get_grad_norm: parameters[0] is a builtins.tuple; give model.parameters(), not model.named_parameters()",
    ),
    "groups": (
        lambda w: clip_grad_norm_([{"params": [parameter(w)]}], 1.0),
        "clip_grad_norm_: parameters[0] is a builtins.dict; give the parameters of all groups",
    ),
    "an array": (
        lambda w: get_grad_norm([parameter(w), np.ones(3)]),
        "parameters[1] is a numpy.ndarray; parameters are tensors of the one framework of this process",
    ),
    "an optimizer": (
        lambda w: clip_grad_norm_(Foreign(), 1.0),
        "clip_grad_norm_: got an optimizer (Foreign); give the model, or the parameters of all groups",
    ),
    "a state dict": (
        lambda w: get_grad_norm({"weight": parameter(w)}),
        "parameters is a dict; it is a module of",
    ),
    "a number": (lambda w: get_grad_norm(3), "parameters is a int; it is a module of"),
    "another shape": (
        lambda w: get_grad_norm([of_other_shape(w)]),
        "main_grad of parameter 0 is a DTensor of shape (2, 4), the parameter has shape (4, 2): they must be equal",
    ),
    "the whole for a piece": (
        lambda w: get_grad_norm([whole_gradient(w)]),
        "main_grad of parameter 0 is a plain tensor of shape (4, 2), this rank's piece of the parameter has shape (2, 2)",
    ),
    "a product": (
        lambda w: clip_grad_norm_([product(w)], 1.0),
        "a gradient of shape (4, 2) is Partial('prod'), so every factor would be scaled: redistribute it",
    ),
    "integers": (
        lambda w: get_grad_norm([of_integers(w)]),
        "a gradient of shape (3,) has dtype int32; norms are taken of floating-point gradients",
    ),
    "before fully_shard": (
        lambda w: clip_grad_norm_([before_fully_shard(w)], 1.0),
        "parameter 0, of shape (3,), is a parameter from before fully_shard",
    ),
    "a mesh of two dims": (
        lambda w: get_grad_norm(
            [parameter(w)], pp_group=init_device_mesh(w.device_type, (1, 2), mesh_dim_names=("pp", "dp"))
        ),
        "pp_group is a mesh of 2 dims",
    ),
    "another group": (
        lambda w: get_grad_norm([parameter(w)], pp_group="pp"),
        "expected a hp_platform.ProcessGroup or None, got str",
    ),
}


def refusal(world: World, call: Callable[[World], Any]) -> str:
    try:
        call(world)
    except ValueError as error:
        return str(error)
    return "accepted"


@distributed(world_size=2)
def test_wrong_calls_are_told_what_was_given_and_what_to_change(world: World) -> None:
    found = {name: refusal(world, call) for name, (call, _) in WRONG.items()}
    assert [(name, found[name]) for name, (_, message) in WRONG.items() if message not in found[name]] == []
    # A product is refused for scaling only: its norm has a meaning.
    assert float(world.platform.to_numpy(get_grad_norm([product(world)]))) == pytest.approx(4 * np.sqrt(8.0))
