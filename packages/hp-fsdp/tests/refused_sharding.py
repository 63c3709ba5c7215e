"""The table of wrong calls: what is done, and what is said."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdp_models import Maker, make_mesh

from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    StateDictOptions,
    full_params,
    fully_shard,
    get_model_state_dict,
    register_forward_method,
    set_model_state_dict,
)
from hp_platform import init_device_mesh
from hp_platform.testing import World

Model = Any
Change = Callable[[World, Model], Any]


@dataclass(frozen=True)
class Call:
    """A wrong call on a model of two blocks and a head."""

    run: Change
    message: str
    error: type[Exception] = ValueError
    before: Change | None = None
    """What is done to the model before; not wrong by itself."""


def refused(message: str, **kwargs: Any) -> Call:
    """An argument of ``fully_shard``."""
    return Call(lambda world, model: fully_shard(model, make_mesh(world), **kwargs), message)


def with_sharded(run: Callable[[Any], Any], message: str, error: type[Exception] = ValueError) -> Call:
    """Something that a sharded model is asked for."""
    return Call(lambda world, model: run(model), message, error, shard)


def shard(world: World, model: Model) -> Model:
    return fully_shard(model, make_mesh(world))


def set_gradient(world: World, model: Model) -> None:
    weight = model.blocks[1].inner.weight
    world.platform.set_grad(weight, world.platform.zeros_like(world.platform.detach(weight)))


def set_dtensor(world: World, model: Model, mesh: Any) -> None:
    """Let the head's weight be one."""
    weight = distribute_tensor(world.platform.detach(model.head.weight), mesh, [Replicate()])
    world.platform.set_parameter(model.head, "weight", world.platform.parameter(weight))


def set_dtensors(world: World, model: Model) -> None:
    """Let all parameters be such."""
    mesh = make_mesh(world)
    for _, module in world.platform.named_modules(model):
        for name, parameter in list(world.platform.named_parameters(module, recurse=False)):
            whole = distribute_tensor(world.platform.detach(parameter), mesh, [Replicate()])
            world.platform.set_parameter(module, name, world.platform.parameter(whole))


def set_low(world: World, model: Model) -> None:
    """Let one parameter have another dtype."""
    low = world.platform.cast(world.platform.detach(model.head.bias), "float16")
    world.platform.set_parameter(model.head, "bias", world.platform.parameter(low))


def both_lists(world: World, model: Model) -> Any:
    one = [model.head.bias]
    return fully_shard(model, make_mesh(world), ignored_params=one, replicate_params=one)


def second_full_params(model: Model) -> None:
    with full_params(model), full_params(model):
        pass


def forward_in_full_params(model: Model) -> None:
    with full_params(model):
        model(None)


def whole_weight(world: World, model: Model) -> Any:
    return world.platform.zeros((9, 4), Maker(world).dtype, world.device)


CALLS: dict[str, Call] = {
    # --- what is sharded
    "no module": Call(
        lambda world, model: fully_shard(model.head.weight), r"fully_shard takes a module of \w+, got \w+"
    ),
    "a list with something that is no module": Call(
        lambda world, model: fully_shard([model.head, "head"]),
        r"fully_shard takes a module of \w+, got str at index 1",
    ),
    "an empty list": Call(
        lambda world, model: fully_shard([]), r"a module or a list of modules, got an empty list"
    ),
    "a list of modules without forward": Call(
        lambda world, model: fully_shard(model.blocks),
        r"a ModuleList has no forward, .*call fully_shard on each of its modules, or on the module that it hangs in",
    ),
    "twice": Call(shard, r"HSDPModel is sharded already: call fully_shard once per module", before=shard),
    "in a list, once more": Call(
        lambda world, model: fully_shard([model.head, model.blocks[0]], make_mesh(world)),
        r"HSDPLinear is sharded already: call fully_shard once per module",
        before=lambda world, model: fully_shard(model.head, make_mesh(world)),
    ),
    "inner module after the outer one": Call(
        lambda world, model: fully_shard(model.head, make_mesh(world)),
        r"parameter 'weight' of Linear is sharded by another unit already, Model as 'head\.weight', .*inner modules first",
        before=shard,
    ),
    "parameter with a gradient": Call(
        shard,
        r"parameter 'blocks\.1\.inner\.weight' of Model has a gradient of its whole shape: clear it",
        before=set_gradient,
    ),
    # --- the mesh
    "mesh that is none": Call(
        lambda world, model: fully_shard(model, world.group),
        r"mesh must be a hp_platform\.DeviceMesh or None, got ProcessGroup: make one with init_device_mesh",
    ),
    "mesh by its shape": Call(
        lambda world, model: fully_shard(model, (2,)),
        r"mesh must be a hp_platform\.DeviceMesh or None, got tuple",
    ),
    "mesh with three dims": Call(
        lambda world, model: fully_shard(model, init_device_mesh(world.device_type, (1, 1, 2))),
        r"takes a 1-D mesh \(shard\) or a 2-D mesh \(replicate, shard\), got 3 dims of sizes \(1, 1, 2\)",
    ),
    "mesh in descending order": Call(
        lambda world, model: fully_shard(model, init_device_mesh(world.device_type, (2,), rank_list=[1, 0])),
        r"the ranks along dim 0 of the mesh must ascend, got \[1, 0\]",
    ),
    "DTensors and others without a mesh": Call(
        lambda world, model: fully_shard(model),
        r"'head\.weight' of Model is a DTensor and 'blocks\.0\.inner\.weight' is not: give the mesh to shard over",
        before=lambda world, model: set_dtensor(world, model, make_mesh(world)),
    ),
    **{
        f"{name} for DTensors that stay": Call(
            lambda world, model, kwargs=kwargs: fully_shard(model, **kwargs),
            rf"'blocks\.0\.inner\.weight' of Model is a DTensor and stays as it is, .*so {said} does not reach it: give the mesh",
            before=set_dtensors,
        )
        for name, said, kwargs in (
            (
                "precision",
                r"mp_policy\.param_dtype",
                {"mp_policy": MixedPrecisionPolicy(param_dtype="float16")},
            ),
            ("offloading", "offload_policy", {"offload_policy": CPUOffloadPolicy()}),
            ("another dim", "shard_placement_fn", {"shard_placement_fn": lambda parameter: Shard(0)}),
        )
    },
    "a DTensor on a mesh without names": Call(
        shard,
        r"'head\.weight' of Model is a DTensor on .*cut both out of one mesh with named dims",
        before=lambda world, model: set_dtensor(world, model, make_mesh(world)),
    ),
    "a DTensor on the very mesh": Call(
        lambda world, model: fully_shard(
            model, init_device_mesh(world.device_type, (2,), mesh_dim_names=("dp",))
        ),
        r"'head\.weight' of Model is a DTensor on .*cut both out of one mesh with named dims",
        before=lambda world, model: set_dtensor(
            world, model, init_device_mesh(world.device_type, (2,), mesh_dim_names=("dp",))
        ),
    ),
    # --- policies
    "policy that is none": refused(
        r"mp_policy must be a hp_fsdp\.MixedPrecisionPolicy, got str", mp_policy="bfloat16"
    ),
    "offload policy that is none": refused(
        r"offload_policy must be a hp_fsdp\.OffloadPolicy, got bool", offload_policy=True
    ),
    "integer param_dtype": refused(
        r"MixedPrecisionPolicy\.param_dtype must be a floating-point dtype, got 'int32'",
        mp_policy=MixedPrecisionPolicy(param_dtype="int32"),
    ),
    "integer output_dtype": refused(
        r"MixedPrecisionPolicy\.output_dtype must be a floating-point dtype, got 'bool'",
        mp_policy=MixedPrecisionPolicy(output_dtype="bool"),
    ),
    "unknown reduce_dtype": refused(r"float7", mp_policy=MixedPrecisionPolicy(reduce_dtype="float7")),
    # --- other arguments
    "reshard_after_forward by a number that does not divide": refused(
        r"reshard_after_forward=3 must divide the 2 ranks that share the parameters", reshard_after_forward=3
    ),
    "reshard_after_forward by zero": refused(r"reshard_after_forward=0 must divide", reshard_after_forward=0),
    "reshard_after_forward by a negative number": refused(
        r"reshard_after_forward=-2 must divide", reshard_after_forward=-2
    ),
    "reshard_after_forward by a fraction": refused(
        r"reshard_after_forward must be True, False or a number of ranks, got 2\.0", reshard_after_forward=2.0
    ),
    "reshard_after_forward by nothing": refused(
        r"reshard_after_forward must be True, False or a number of ranks, got None",
        reshard_after_forward=None,
    ),
    "comm_fusion by a number": refused(r"comm_fusion must be True, False or None, got 1", comm_fusion=1),
    "comm_fusion_zero_copy by a word": refused(
        r"comm_fusion_zero_copy must be True, False or None, got 'auto'", comm_fusion_zero_copy="auto"
    ),
    "comm_fusion with two dtypes": Call(
        lambda world, model: fully_shard(model, make_mesh(world), comm_fusion=True),
        r"comm_fusion=True needs one dtype for all parameters of a unit: 'head\.bias' is computed with float16, .*mp_policy",
        before=set_low,
    ),
    "ignored names": refused(
        r"ignored_params\[0\] must be a parameter, got str", ignored_params=["head.weight"]
    ),
    "replicated names": refused(
        r"replicate_params\[0\] must be a parameter, got str", replicate_params=["head.weight"]
    ),
    "one ignored parameter": Call(
        lambda world, model: fully_shard(model, make_mesh(world), ignored_params=model.head.weight),
        r"ignored_params must be several parameters, such as a list or set, got \w+",
    ),
    "a number of replicated parameters": refused(
        r"replicate_params must be several parameters, such as a list or set, got int", replicate_params=3
    ),
    "ignored and replicated": Call(
        both_lists, r"a parameter is in ignored_params and in replicate_params: give it in one of them"
    ),
    "no function for placements": refused(
        r"shard_placement_fn must be a function from a parameter to a Shard or None, got Shard",
        shard_placement_fn=Shard(1),
    ),
    "a dim for a placement": refused(
        r"shard_placement_fn must return a Shard or None, got 1 for parameter 'blocks\.0\.inner\.weight'",
        shard_placement_fn=lambda parameter: 1,
    ),
    "another placement": refused(
        r"shard_placement_fn must return a Shard or None, got Replicate\(\) for parameter 'blocks\.0\.inner\.weight'",
        shard_placement_fn=lambda parameter: Replicate(),
    ),
    "a dim that a parameter does not have": refused(
        r"shard_placement_fn gave Shard\(1\) for parameter 'blocks\.0\.inner\.bias' of shape \(5,\): it has no such dim",
        shard_placement_fn=lambda parameter: Shard(1),
    ),
    "a negative dim that a parameter does not have": refused(
        r"shard_placement_fn gave Shard\(-2\) for parameter 'blocks\.0\.inner\.bias' of shape \(5,\)",
        shard_placement_fn=lambda parameter: Shard(-2),
    ),
    # --- methods of sharded modules
    "sync switch": with_sharded(
        lambda model: model.set_requires_gradient_sync(None),
        r"requires_gradient_sync must be True or False, got None",
    ),
    "all-reduce switch": with_sharded(
        lambda model: model.set_requires_all_reduce(1), r"requires_all_reduce must be True or False, got 1"
    ),
    "last backward": with_sharded(
        lambda model: model.set_is_last_backward("yes"), r"is_last_backward must be True or False, got 'yes'"
    ),
    "reshard switch": with_sharded(
        lambda model: model.set_reshard_after_forward(1),
        r"reshard_after_forward must be True or False, got 1",
    ),
    "reshard switch of backward": with_sharded(
        lambda model: model.set_reshard_after_backward(None),
        r"reshard_after_backward must be True or False, got None",
    ),
    "recursion": with_sharded(
        lambda model: model.set_requires_all_reduce(True, recurse="all"),
        r"recurse must be True or False, got 'all'",
    ),
    "unshard": with_sharded(
        lambda model: model.unshard(async_op=1), r"async_op must be True or False, got 1"
    ),
    "reduce operation": with_sharded(
        lambda model: model.set_reduce_op_type("max"), r"reduce_op_type must be 'avg' or 'sum', got 'max'"
    ),
    "factor that is true": with_sharded(
        lambda model: model.set_gradient_scaling_factor(True),
        r"factor must be a number, a tensor with one element, or None, got True",
    ),
    "factor by a word": with_sharded(
        lambda model: model.set_gradient_scaling_factor("2"),
        r"factor must be a number, a tensor with one element, or None, got '2'",
    ),
    "factor with several elements": Call(
        lambda world, model: model.set_gradient_scaling_factor(world.platform.zeros((2,))),
        r"factor must be a number, a tensor with one element, or None, got a tensor of shape \(2,\)",
        before=shard,
    ),
    "prefetching one module": with_sharded(
        lambda model: model.set_modules_to_forward_prefetch(model),
        r"set_modules_to_forward_prefetch takes a list of modules that fully_shard was called on, got HSDPModel",
    ),
    "prefetching a module without a unit": with_sharded(
        lambda model: model.set_modules_to_backward_prefetch([model, model.head]),
        r"set_modules_to_backward_prefetch takes a list of modules .*got \['HSDPModel', 'Linear'\]",
    ),
    "a method that is none": with_sharded(
        lambda model: register_forward_method(model, "encode"), r"HSDPModel has no method 'encode'"
    ),
    "copy": with_sharded(
        copy.deepcopy,
        r"cannot be copied or pickled after fully_shard \(HSDPModel\): copy it before, and save get_model_state_dict",
        RuntimeError,
    ),
    "pickle": with_sharded(
        pickle.dumps, r"cannot be copied or pickled after fully_shard \(HSDPModel\)", RuntimeError
    ),
    # --- values
    "a state dict without names": with_sharded(
        lambda model: model.load_state_dict({}),
        r"the state dict does not fit HSDPModel: missing blocks\.0\.inner\.weight, .*strict=False",
        RuntimeError,
    ),
    "a state dict with another name": with_sharded(
        lambda model: set_model_state_dict(model, {**get_model_state_dict(model), "tail": 1}),
        r"missing nothing; unexpected tail",
        RuntimeError,
    ),
    "a value of another shape": Call(
        lambda world, model: set_model_state_dict(
            model, {**get_model_state_dict(model), "head.weight": whole_weight(world, model)}
        ),
        r"'head\.weight' has shape \(3, 4\), its shard on rank \d \([12], 4\); the given value has \(9, 4\)",
        before=shard,
    ),
    "no state dict": with_sharded(
        lambda model: set_model_state_dict(model, [1]),
        r"a state dict is a mapping from names to tensors, got list",
    ),
    "options of another kind": with_sharded(
        lambda model: get_model_state_dict(model, options={"full_state_dict": True}),
        r"options must be a hp_fsdp\.StateDictOptions, got dict",
    ),
    "an option by a number": with_sharded(
        lambda model: get_model_state_dict(model, options=StateDictOptions(full_state_dict=1)),  # type: ignore[arg-type]
        r"StateDictOptions\.full_state_dict must be True or False, got 1",
    ),
    "full_params of something else": with_sharded(
        lambda model: full_params({"model": model}).__enter__(),
        r"full_params takes a module of \w+, got dict",
    ),
    "full_params twice": with_sharded(
        second_full_params,
        r"full_params is open already for HSDPModel",
        RuntimeError,
    ),
    "forward in full_params": with_sharded(
        forward_in_full_params,
        r"forward of HSDPModel inside of full_params: units gather by themselves",
        RuntimeError,
    ),
}
