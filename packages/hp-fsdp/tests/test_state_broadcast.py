"""Only rank 0 has the values: they are checked on all ranks, sent one at a time, and land in every shard."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_dtensor import Replicate, Shard, StridedShard, distribute_tensor
from hp_dtensor.states.broadcast import Announced, announce, home_of, send
from hp_fsdp import StateDictOptions, fully_shard, get_model_state_dict, set_model_state_dict
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import PROGRAMS, Maker, make_mesh

FULL = StateDictOptions(full_state_dict=True)
FROM_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def new_values(world: World, model: Any) -> dict[str, Any]:
    """Other ones than the model's, on the cpu, as a file gives them; tied ones share memory."""
    state = get_model_state_dict(model, options=FULL)
    made = {id(x): world.platform.to_device(x + 1, "cpu") for x in state.values()}
    return {name: made[id(x)] for name, x in state.items()}


@pytest.mark.parametrize("name", ["mlp", "tied", "scalars", "uneven"])
@distributed(world_size=(1, 3))
def test_values_of_rank_0_arrive_in_all_shards(world: World, name: str) -> None:
    program, platform = PROGRAMS[name], world.platform
    model = program.build(Maker(world))
    platform.register_buffer(model, "count", platform.tensor([3, 4], "int64", world.device))
    platform.register_buffer(model, "flag", platform.tensor([True, False], "bool", world.device))
    program.shard(model, make_mesh(world))
    new = new_values(world, model)
    new["count"], new["flag"] = (
        platform.tensor([5, 6], "int64", "cpu"),
        platform.tensor([False, True], "bool", "cpu"),
    )
    with count_collectives() as counted:
        names = set_model_state_dict(model, new if world.rank == 0 else {}, options=FROM_0)
    assert names == ([], [])
    if world.size == 1:
        counted.assert_counts()
    else:
        # Two broadcasts announce; a tied parameter travels once.
        num_tensors = len({id(x) for x in new.values()})
        counted.assert_counts(broadcast=2 + num_tensors, all_gather=1)
        sizes = [x.size if name == "flag" else x.nbytes for name, x in _arrays(world, new).items()]
        assert sum(sizes) <= counted.nbytes("broadcast") <= sum(sizes) + 200 * (len(new) + 2)
    assert_parity(get_model_state_dict(model, options=FULL), new, exact=True)


def _arrays(world: World, state: dict[str, Any]) -> dict[str, Any]:
    once = {id(x): (name, x) for name, x in state.items()}
    return {name: world.platform.to_numpy(x) for name, x in once.values()}


@pytest.mark.parametrize("placements", [(StridedShard(0, 2), Shard(0)), (Replicate(), Shard(1))])
@distributed(world_size=4, backends=("torch", "cuda"))
def test_values_of_rank_0_arrive_in_every_placement(world: World, placements: tuple[Any, ...]) -> None:
    platform = world.platform
    mesh = init_device_mesh(world.device_type, (2, 2))
    module = Maker(world).linear(17, 5)
    for name, p in list(platform.named_parameters(module)):
        at = placements if len(p.shape) > 1 else (Replicate(), Shard(0))
        platform.set_parameter(
            module, name, platform.parameter(distribute_tensor(platform.detach(p), mesh, at))
        )
    new = new_values(world, module)
    set_model_state_dict(module, new if world.rank == 0 else {}, options=FROM_0)
    assert_parity(get_model_state_dict(module, options=FULL), new, exact=True)


@distributed(world_size=4, backends=("torch", "cuda"))
def test_values_come_from_the_lowest_rank_of_the_models_own_mesh(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2, 2), mesh_dim_names=("stage", "data"))
    module = fully_shard(Maker(world).linear(5, 3), mesh["data"])
    stage = world.rank // 2
    new = {name: x + stage for name, x in new_values(world, module).items()}
    set_model_state_dict(module, new if world.rank % 2 == 0 else {}, options=FROM_0)
    assert_parity(get_model_state_dict(module, options=FULL), new, exact=True)


@distributed(world_size=2)
def test_one_whole_value_is_there_at_a_time(world: World) -> None:
    platform = world.platform
    model = PROGRAMS["mlp"].shard(PROGRAMS["mlp"].build(Maker(world)), make_mesh(world))
    home = home_of(platform, [p for _, p in platform.named_parameters(model)])
    mine = (
        {}
        if world.rank
        else {n: platform.tensor(np.ones((3, i)), "float32", "cpu") for i, n in enumerate("abcd")}
    )
    announced = announce(platform, mine, home)
    assert {n: (x.shape, x.dtype) for n, x in announced.items() if isinstance(x, Announced)} == {
        n: ((3, i), "float32") for i, n in enumerate("abcd")
    }
    seen: list[Any] = []

    def receive(names: list[str], whole: Any) -> None:
        kept_by_rank_0 = list(mine.values())
        assert all(ref() is None or any(ref() is x for x in kept_by_rank_0) for ref in seen)
        seen.append(weakref.ref(whole))

    send(platform, announced, mine, home, receive)
    assert len(seen) == 4


@distributed(world_size=2)
def test_what_rank_0_gives_wrong_is_refused_by_all_ranks_before_anything_is_written(world: World) -> None:
    program, platform = PROGRAMS["mlp"], world.platform
    model = program.shard(program.build(Maker(world)), make_mesh(world))
    before = {n: platform.to_numpy(x) for n, x in get_model_state_dict(model, options=FULL).items()}
    new, name = new_values(world, model), "head.bias"
    without = {key: x for key, x in new.items() if key != name}
    cases = [
        (
            without,
            RuntimeError,
            r"does not fit HSDPModel: missing head\.bias; unexpected nothing; rename them",
        ),
        ({**new, "more": new[name]}, RuntimeError, r"missing nothing; unexpected more"),
        ({**new, name: new["head.weight"]}, ValueError, r"'head\.bias' has shape \(3,\), .*has \(3, 4\)"),
        (
            get_model_state_dict(model),
            ValueError,
            r"takes whole tensors, '\S+' is a DTensor: give its full_tensor",
        ),
    ]
    for given, error, message in cases:
        with pytest.raises(error, match=message):
            set_model_state_dict(model, given if world.rank == 0 else {}, options=FROM_0)
    message = "is a mapping from names to tensors, got list"
    with pytest.raises(
        ValueError, match=message if world.rank == 0 else f"rank 0, .*cannot load: .*{message}"
    ):
        set_model_state_dict(model, [] if world.rank == 0 else {}, options=FROM_0)
    error, message = (ValueError, message) if world.rank else (RuntimeError, "state_dict: rank 1 cannot load")
    with pytest.raises(error, match=message):
        set_model_state_dict(model, new if world.rank == 0 else [], options=FROM_0)
    assert_parity(get_model_state_dict(model, options=FULL), before, exact=True)
    loose = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    given = {**without, "more": new[name]}
    names = set_model_state_dict(model, given if world.rank == 0 else {}, options=loose)
    assert names == (["head.bias"], ["more"])
    found = get_model_state_dict(model, options=FULL)
    assert_parity({key: found[key] for key in without}, without, exact=True)
    assert_parity(found[name], before[name], exact=True)


@distributed(world_size=2)
def test_what_one_rank_must_refuse_no_rank_loads(world: World) -> None:
    platform, mesh = world.platform, make_mesh(world)
    module = Maker(world).linear(5, 3)
    fully_shard(module, mesh)
    if world.rank == 1:
        platform.register_buffer(module, "mine", platform.zeros((1,), "float32", world.device))
    before = {n: platform.to_numpy(x) for n, x in get_model_state_dict(module, options=FULL).items()}
    new = {n: platform.tensor(before[n] + 1, "float64", "cpu") for n in ("weight", "bias")}
    message = "missing mine" if world.rank == 1 else r"set_model_state_dict: rank 1 cannot load, and says why"
    with pytest.raises(RuntimeError, match=message):
        set_model_state_dict(module, new if world.rank == 0 else {}, options=FROM_0)
    assert_parity(get_model_state_dict(module, options=FULL), before, exact=True)
