"""Wrong calls are refused at once, with what was given and what to do; and nothing has changed then."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import DTensor
from hp_fsdp import HSDPModule, fully_shard
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
import refused_arguments
import refused_methods
import refused_sharding
import refused_values
from fsdp_models import PROGRAMS, Maker, local, loss_of, make_mesh, tolerance
from refused_calls import Call, shard

CALLS: dict[str, Call] = {
    **refused_sharding.CALLS,
    **refused_arguments.CALLS,
    **refused_methods.CALLS,
    **refused_values.CALLS,
}


def snapshot(world: World, model: Any) -> dict[str, Any]:
    """Everything that a refused call might have changed."""
    platform = world.platform
    found: dict[str, Any] = {}
    for path, module in platform.named_modules(model):
        found[f"class of {path}"] = type(module)
        found[f"attributes of {path}"] = sorted(
            name for name, value in vars(module).items() if "hp_fsdp" in name and value is not False
        )
        for name, parameter in platform.named_parameters(module, recurse=False, remove_duplicate=False):
            key = f"{path}.{name}"
            gradient = platform.get_grad(local(parameter))
            found[f"object {key}"] = id(parameter)
            found[f"values {key}"] = platform.to_bits(platform.detach(local(parameter))).tolist()
            found[f"marks {key}"] = sorted(name for name in vars(parameter) if name.startswith("_hp_fsdp"))
            found[f"gradient {key}"] = None if gradient is None else platform.to_bits(gradient).tolist()
            found[f"asks {key}"] = platform.requires_grad(parameter)
    return found


@pytest.mark.parametrize("name", list(CALLS))
@distributed(world_size=2)
def test_a_wrong_call_is_refused_and_changes_nothing(world: World, name: str) -> None:
    call, model = CALLS[name], PROGRAMS["mlp"].build(Maker(world))
    if call.before is not None:
        call.before(world, model)
    before = snapshot(world, model)
    with pytest.raises(call.error, match=call.message):
        call.run(world, model)
    assert snapshot(world, model) == before


@distributed(world_size=2)
def test_after_all_wrong_calls_a_model_trains_as_if_nothing_had_been(world: World) -> None:
    platform, program = world.platform, PROGRAMS["mlp"]
    reference, model = program.build(Maker(world)), program.build(Maker(world))
    for is_sharded in (False, True):
        for call in CALLS.values():
            if call.before is (shard if is_sharded else None):
                with pytest.raises(call.error, match=call.message):
                    call.run(world, model)
        if not is_sharded:
            shard(world, model)
    assert isinstance(model, HSDPModule)
    inputs = program.inputs(Maker(world), 0, 0)  # the same on all ranks
    for each in (reference, model):
        platform.backward([loss_of(platform, each(inputs))])
    for (name, ours), (_, theirs) in zip(
        platform.named_parameters(model), platform.named_parameters(reference), strict=True
    ):
        assert isinstance(ours, DTensor)
        assert_parity(ours.grad, platform.get_grad(theirs), **tolerance(world), name=name)


def test_there_are_many_wrong_calls() -> None:
    assert len(CALLS) >= 50


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
    model = shard(world, PROGRAMS["mlp"].build(Maker(world)))
    piece = local(model.head.weight)
    platform.set_data_(piece, platform.zeros((3, 4), Maker(world).dtype, world.device))
    message = r"the shard of parameter 'head\.weight' was changed after fully_shard: it is \(3, 4\) .*, and must be \([12], 4\)"
    with pytest.raises(RuntimeError, match=message):
        model(PROGRAMS["mlp"].inputs(Maker(world), 0, 0))


@distributed(world_size=2)
def test_other_memory_below_a_shard_counts(world: World) -> None:
    """p.data = x: the values of x are what the model computes with, and writing to the parameter goes on to count."""
    platform = world.platform
    program = PROGRAMS["mlp"]
    model = shard(world, program.build(Maker(world)))
    inputs = program.inputs(Maker(world), 0, 0)
    for _, parameter in platform.named_parameters(model):
        piece = local(parameter)
        platform.set_data_(piece, platform.detach(piece) * 0.0)
    assert not platform.to_numpy(model(inputs)).any()
    for _, parameter in platform.named_parameters(model):
        platform.add_(local(parameter), 1.0)
    reference = program.build(Maker(world))
    for _, parameter in platform.named_parameters(reference):
        platform.fill_(parameter, 1.0)
    assert (platform.to_numpy(model(inputs)) == platform.to_numpy(reference(inputs))).all()
