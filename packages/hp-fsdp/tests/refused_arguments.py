"""Wrong arguments of ``fully_shard``: policies, flags, placements, lists of parameters."""

from __future__ import annotations

from typing import Any

from fsdp_models import make_mesh
from refused_calls import Call, Model, refused

from hp_dtensor import Replicate, Shard
from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_platform.testing import World


def set_low(world: World, model: Model) -> None:
    """Let one parameter have another dtype."""
    low = world.platform.cast(world.platform.detach(model.head.bias), "float16")
    world.platform.set_parameter(model.head, "bias", world.platform.parameter(low))


def both_lists(world: World, model: Model) -> Any:
    one = [model.head.bias]
    return fully_shard(model, make_mesh(world), ignored_params=one, replicate_params=one)


CALLS: dict[str, Call] = {
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
    "unknown reduce_dtype": refused(
        r"unknown dtype 'float7'; expected a \w+.dtype or one of float32, .*bfloat16",
        mp_policy=MixedPrecisionPolicy(reduce_dtype="float7"),
    ),
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
}
