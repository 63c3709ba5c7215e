"""Wrong calls are refused at once, with what was given and what to do; and nothing has changed then."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hp_fsdp import HSDPModule, MixedPrecisionPolicy, fully_shard
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import PROGRAMS, Maker, local, make_mesh


def with_gradient(world: World, model: Any) -> Any:
    weight = model.blocks[1].inner.weight
    world.platform.set_grad(weight, world.platform.zeros_like(world.platform.detach(weight)))
    return model


def sharded(world: World, model: Any) -> Any:
    return fully_shard(model, make_mesh(world))


CALLS: dict[str, tuple[Callable[[World, Any], Any], type[Exception], str]] = {
    "no module": (
        lambda world, model: fully_shard(model.head.weight),
        ValueError,
        r"fully_shard takes a module of \w+, got \w+",
    ),
    "a list with something that is no module": (
        lambda world, model: fully_shard([model.head, "head"]),
        ValueError,
        r"fully_shard takes a module of \w+, got str at index 1",
    ),
    "an empty list": (
        lambda world, model: fully_shard([]),
        ValueError,
        r"a module or a list of modules, got an empty list",
    ),
    "a list of modules without forward": (
        lambda world, model: fully_shard(model.blocks),
        ValueError,
        r"a ModuleList has no forward, .*call fully_shard on each of its modules",
    ),
    "twice": (
        lambda world, model: fully_shard(sharded(world, model)),
        ValueError,
        r"HSDPModel is sharded already: call fully_shard once per module",
    ),
    "inner module after the outer one": (
        lambda world, model: fully_shard(sharded(world, model).head),
        ValueError,
        r"parameter 'weight' of Linear is sharded by another unit already, Model as 'head\.weight', .*inner modules first",
    ),
    "mesh that is none": (
        lambda world, model: fully_shard(model, world.group),
        ValueError,
        r"mesh must be a hp_platform\.DeviceMesh or None, got ProcessGroup",
    ),
    "mesh with three dims": (
        lambda world, model: fully_shard(model, init_device_mesh(world.device_type, (1, 1, 2))),
        ValueError,
        r"takes a 1-D mesh \(shard\) or a 2-D mesh \(replicate, shard\), got 3 dims of sizes \(1, 1, 2\)",
    ),
    "mesh in descending order": (
        lambda world, model: fully_shard(model, init_device_mesh(world.device_type, (2,), rank_list=[1, 0])),
        ValueError,
        r"the ranks along dim 0 of the mesh must ascend, got \[1, 0\]",
    ),
    "policy that is none": (
        lambda world, model: fully_shard(model, mp_policy="bfloat16"),
        ValueError,
        r"mp_policy must be a hp_fsdp\.MixedPrecisionPolicy, got str",
    ),
    "integer param_dtype": (
        lambda world, model: fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype="int32")),
        ValueError,
        r"MixedPrecisionPolicy\.param_dtype must be a floating-point dtype, got 'int32'",
    ),
    "unknown reduce_dtype": (
        lambda world, model: fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype="float7")),
        ValueError,
        r"float7",
    ),
    "reshard_after_forward by number": (
        lambda world, model: fully_shard(model, make_mesh(world), reshard_after_forward=3),
        ValueError,
        r"reshard_after_forward=3 must divide the 2 ranks that share the parameters",
    ),
    "ignored names": (
        lambda world, model: fully_shard(model, ignored_params=["head.weight"]),
        ValueError,
        r"ignored_params\[0\] must be a parameter, got str",
    ),
    "parameter with a gradient": (
        lambda world, model: fully_shard(with_gradient(world, model)),
        ValueError,
        r"parameter 'blocks\.1\.inner\.weight' of Model has a gradient of its whole shape: clear it",
    ),
    "sync switch": (
        lambda world, model: sharded(world, model).set_requires_gradient_sync(None),
        ValueError,
        r"requires_gradient_sync must be True or False, got None",
    ),
    "reshard switch": (
        lambda world, model: sharded(world, model).set_reshard_after_forward(1),
        ValueError,
        r"reshard_after_forward must be True or False, got 1",
    ),
    "copy": (
        lambda world, model: copy.deepcopy(sharded(world, model)),
        RuntimeError,
        r"cannot be copied or pickled after fully_shard \(HSDPModel\): copy it before, and save get_model_state_dict",
    ),
    "pickle": (
        lambda world, model: pickle.dumps(sharded(world, model)),
        RuntimeError,
        r"cannot be copied or pickled after fully_shard \(HSDPModel\)",
    ),
}


@pytest.mark.parametrize("call", list(CALLS))
@distributed(world_size=2)
def test_a_wrong_call_is_refused(world: World, call: str) -> None:
    function, error, message = CALLS[call]
    with pytest.raises(error, match=message):
        function(world, PROGRAMS["mlp"].build(Maker(world)))


@distributed(world_size=2)
def test_a_refused_module_is_as_it_was(world: World) -> None:
    platform = world.platform
    model = with_gradient(world, PROGRAMS["mlp"].build(Maker(world)))
    cls, shapes = type(model), [tuple(p.shape) for _, p in platform.named_parameters(model)]
    with pytest.raises(ValueError, match="has a gradient"):
        fully_shard(model, make_mesh(world))
    assert type(model) is cls
    assert [tuple(p.shape) for _, p in platform.named_parameters(model)] == shapes
    platform.set_grad(model.blocks[1].inner.weight, None)
    assert isinstance(fully_shard(model, make_mesh(world)), HSDPModule)


@distributed(world_size=2)
def test_a_tie_between_two_units_is_refused_with_both_owners(world: World) -> None:
    model = PROGRAMS["tied"].build(Maker(world))
    fully_shard(model.embed, make_mesh(world))
    message = r"parameter 'weight' of Linear is sharded by another unit already, Embedding as 'weight', .*holds both"
    with pytest.raises(ValueError, match=message):
        fully_shard(model.head, make_mesh(world))
    assert fully_shard(model, make_mesh(world)).head.weight is model.embed.weight


@distributed(world_size=2)
def test_a_tie_between_units_on_different_meshes_is_refused(world: World) -> None:
    model = PROGRAMS["tied"].build(Maker(world))
    fully_shard(model.embed, make_mesh(world))
    message = (
        r"parameter 'head\.weight' of Model is also 'weight' of Embedding, which is sharded over another mesh"
    )
    with pytest.raises(ValueError, match=message):
        fully_shard(model, make_mesh(world, replicas=2))


@distributed(world_size=2)
def test_a_shard_of_another_shape_is_refused_at_the_next_gather(world: World) -> None:
    platform = world.platform
    model = sharded(world, PROGRAMS["mlp"].build(Maker(world)))
    shard = local(model.head.weight)
    platform.set_data_(shard, platform.zeros((3, 4), Maker(world).dtype, world.device))
    message = r"the shard of parameter 'head\.weight' was changed after fully_shard: it is \(3, 4\) .*, and must be \([12], 4\)"
    with pytest.raises(RuntimeError, match=message):
        model(PROGRAMS["mlp"].inputs(Maker(world), 0, 0))


@distributed(world_size=2)
def test_other_memory_below_a_shard_counts(world: World) -> None:
    """p.data = x: the values of x are what the model computes with, and writing to the parameter goes on to count."""
    platform = world.platform
    program = PROGRAMS["mlp"]
    model = sharded(world, program.build(Maker(world)))
    inputs = program.inputs(Maker(world), 0, 0)
    for _, shard in platform.named_parameters(model):
        platform.set_data_(local(shard), platform.detach(local(shard)) * 0.0)
    assert not platform.to_numpy(model(inputs)).any()
    for _, shard in platform.named_parameters(model):
        platform.add_(local(shard), 1.0)
    reference = program.build(Maker(world))
    for _, parameter in platform.named_parameters(reference):
        platform.fill_(parameter, 1.0)
    assert (platform.to_numpy(model(inputs)) == platform.to_numpy(reference(inputs))).all()
