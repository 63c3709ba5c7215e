"""Wrong calls of the methods of sharded modules."""

from __future__ import annotations

import copy
import pickle

from refused_calls import Call, shard, with_sharded

from hp_fsdp import register_forward_method

CALLS: dict[str, Call] = {
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
}
