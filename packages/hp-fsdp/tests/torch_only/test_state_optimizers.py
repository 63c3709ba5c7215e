"""State of torch's own optimizers goes out and in by names, and training goes on as if nothing had happened."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_dtensor import DTensor, load, save
from hp_fsdp import (
    StateDictOptions,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    like_parameters,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from torch_models import CLOSE, TORCH, batch, loss_of, make, make_mesh, meshes, parameters, shard

optim = torch.optim
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, lists": lambda ps: optim.AdamW(ps, 1e-2, weight_decay=0.1, foreach=True),
    "AdamW, fused": lambda ps: optim.AdamW(ps, 1e-2, weight_decay=0.1, fused=True),
    "AdamW, one by one": lambda ps: optim.AdamW(ps, 1e-2, amsgrad=True, foreach=False),
    "AdamW, rate is a tensor": lambda ps: optim.AdamW(
        ps, torch.tensor(1e-2, dtype=torch.float64), foreach=False
    ),
    "NAdam": lambda ps: optim.NAdam(ps, 1e-2),
    "SGD": lambda ps: optim.SGD(ps, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD, plain": lambda ps: optim.SGD(ps, 0.1),
    "Adagrad": lambda ps: optim.Adagrad(ps, 1e-2),
    "RMSprop": lambda ps: optim.RMSprop(ps, 1e-3, momentum=0.9, centered=True),
    "Adafactor": lambda ps: optim.Adafactor(ps, 1e-2),
}
FULL = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: torch.Tensor) -> None:
    loss_of(model, samples).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(world: World, mesh: Any, name: str, num_steps: int = 2) -> tuple[Any, Any]:
    model = shard(make(world), mesh)
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(num_steps):
        train(model, optimizer, batch(world, step)[1])
    return model, optimizer


def state_by_name(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Of one process, by torch itself."""
    names = {id(p): n for n, p in model.named_parameters()}
    return {names[id(p)]: dict(entry) for p, entry in optimizer.state.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(world_size=(1, 3, 4), backends=TORCH)
def test_whole_state_is_that_of_one_process_and_reading_changes_nothing(world: World, name: str) -> None:
    reference = make(world)
    theirs = OPTIMIZERS[name](reference.parameters())
    for step in range(2):
        train(reference, theirs, batch(world, step)[0])
    expected = state_by_name(reference, theirs)
    for mesh in meshes(world):
        model, optimizer = trained(world, mesh, name)
        before = {id(p): {key: id(x) for key, x in entry.items()} for p, entry in optimizer.state.items()}
        with count_collectives() as counted:
            found = get_optimizer_state_dict(model, optimizer, options=FULL)
        tensors = [x for entry in optimizer.state.values() for x in entry.values() if isinstance(x, DTensor)]
        moved = [x for x in tensors if any(p.is_shard() for p in x.placements)]
        counted.assert_counts(all_gather=len(moved) if mesh.shape[-1] > 1 else 0)
        assert list(found["state"]) == [n for n, _ in model.named_parameters() if n in expected]
        assert "unused" not in found["state"] or name == "Adagrad"  # which makes its state at once
        assert_parity(found["state"], expected, **CLOSE, name=f"state of {name}")
        assert [g["params"] for g in found["param_groups"]] == [[n for n, _ in model.named_parameters()]]
        assert found["param_groups"][0]["lr"] == theirs.param_groups[0]["lr"]
        assert before == {
            id(p): {key: id(x) for key, x in entry.items()} for p, entry in optimizer.state.items()
        }


@pytest.mark.parametrize("kind", ["whole", "sharded", "of rank 0", "whole into a used one"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(world_size=3, backends=TORCH)
def test_training_goes_on_bit_by_bit_with_a_loaded_optimizer(world: World, name: str, kind: str) -> None:
    mesh = make_mesh(world)
    model, optimizer = trained(world, mesh, name)
    options = ON_RANK_0 if kind == "of rank 0" else None if kind == "sharded" else FULL
    weights = get_model_state_dict(model, options=options)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    assert (state == {}) is (kind == "of rank 0" and world.rank > 0)
    kept = copy.deepcopy(state)
    again = shard(make(world), mesh)
    fresh = OPTIMIZERS[name](again.parameters())
    if kind == "whole into a used one":
        train(again, fresh, batch(world, 9)[1])
    for each in fresh.param_groups:
        if not isinstance(each["lr"], torch.Tensor):
            each["lr"] = 77.0
    options = FROM_0 if kind == "of rank 0" else None
    set_model_state_dict(again, weights, options=options)
    assert set_optimizer_state_dict(again, fresh, state, options=options) == ([], [])
    for step in range(2, 4):
        for each, its in ((model, optimizer), (again, fresh)):
            train(each, its, batch(world, step)[1])
    assert_parity(parameters(again), parameters(model), exact=True)
    if world.rank == 0 and kind != "sharded":  # a sharded one shares memory with the first optimizer
        assert_parity(
            state["state"], kept["state"], exact=True, name="the dict, which training does not touch"
        )


@pytest.mark.parametrize("name", ["AdamW, lists", "SGD", "Adafactor"])
@distributed(world_size=4, backends=TORCH)
def test_a_saved_optimizer_is_loaded_at_other_numbers_of_ranks(
    world: World, name: str, tmp_path: Path
) -> None:
    square = init_device_mesh(world.device_type, (2, 2), mesh_dim_names=("rows", "columns"))
    single = init_device_mesh(world.device_type, (4, 1), mesh_dim_names=("ranks", "one"))
    model, optimizer = trained(world, make_mesh(world), name)
    expected = get_optimizer_state_dict(model, optimizer, options=FULL)
    save(
        {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)},
        tmp_path,
    )
    for mesh in (square, square["columns"], single["one"], make_mesh(world)):
        again = shard(make(world), mesh)
        # Into a fresh optimizer: whole tensors on the cpu, of which each rank takes its pieces.
        fresh = OPTIMIZERS[name](again.parameters())
        stored = load(tmp_path)
        assert set_optimizer_state_dict(again, fresh, stored["optimizer"]) == ([], [])
        assert set_model_state_dict(again, stored["model"]) == ([], [])
        found = get_optimizer_state_dict(again, fresh, options=FULL)
        assert_parity(found["state"], expected["state"], exact=True)
        assert found["param_groups"] == expected["param_groups"]
        assert_parity(
            get_model_state_dict(again, options=FULL), get_model_state_dict(model, options=FULL), exact=True
        )
        # Or its pieces only.
        again = shard(make(world), mesh)
        fresh = OPTIMIZERS[name](again.parameters())
        stored = load(tmp_path, like=like_parameters(again))
        pieces = [x for entry in stored["optimizer"]["state"].values() for x in entry.values()]
        assert {isinstance(x, DTensor) for x in pieces if x.ndim == 2 and 1 not in x.shape} <= {True}
        assert all(isinstance(x, DTensor) for x in stored["model"].values())
        set_optimizer_state_dict(again, fresh, stored["optimizer"])
        set_model_state_dict(again, stored["model"])
        assert_parity(
            get_optimizer_state_dict(again, fresh, options=FULL)["state"], expected["state"], exact=True
        )
        assert_parity(get_model_state_dict(again), get_model_state_dict(model, options=FULL), exact=True)
        train(again, fresh, batch(world, 2)[1])
        # In place, each rank reads its pieces only: into a state that has the same entries.
        model_2, used = trained(world, mesh, name, num_steps=1)
        template = get_optimizer_state_dict(model_2, used)
        load({"model": get_model_state_dict(model_2), "optimizer": template}, tmp_path)
        set_optimizer_state_dict(model_2, used, template)
        found = get_optimizer_state_dict(model_2, used, options=FULL)
        assert_parity(found["state"], expected["state"], exact=True)


@distributed(world_size=2, backends=TORCH)
def test_lbfgs_whose_state_is_of_no_one_parameter_is_refused(world: World) -> None:
    model = shard(make(world), make_mesh(world))
    optimizer = optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch(world, 0)[0])
        loss.backward()
        return loss.detach()

    for _ in range(2):
        optimizer.step(closure)
    with pytest.raises(
        ValueError, match=r"of the optimizer is a list with tensors in it; .* keep the state apart"
    ):
        get_optimizer_state_dict(model, optimizer)


class Counting(torch.nn.Linear):
    """A layer that adds something to state dicts which is no tensor."""

    def __init__(self) -> None:
        super().__init__(3, 5)
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


@distributed(world_size=2, backends=TORCH)
def test_extra_state_of_modules_goes_out_and_in(world: World) -> None:
    models = [
        fully_shard(torch.nn.Sequential(Counting()).to(world.device), make_mesh(world)) for _ in range(2)
    ]
    models[0][0].calls = 7
    for get, put in ((None, None), (ON_RANK_0, FROM_0)):
        state = get_model_state_dict(models[0], options=get)
        assert state == {} or state["0._extra_state"] == {"calls": 7}
        models[1][0].calls = 0
        assert set_model_state_dict(models[1], state, options=put) == ([], [])
        assert models[1][0].calls == 7
        assert_parity(get_model_state_dict(models[1]), get_model_state_dict(models[0]), exact=True)


@distributed(world_size=2, backends=TORCH)
def test_a_model_from_the_meta_device_gets_its_values_from_rank_0(world: World) -> None:
    reference = make(world)
    model = shard(make(world).to("meta"), make_mesh(world))
    state = reference.state_dict() if world.rank == 0 else {}
    with pytest.raises(
        RuntimeError, match=r"is on the meta device and has no memory to load into: materialise"
    ):
        set_model_state_dict(model, state, options=FROM_0)
    model.to_empty(device=world.device)
    assert set_model_state_dict(model, state, options=FROM_0) == ([], [])
    ids = batch(world, 0)[0]
    assert_parity(model(ids), reference(ids), **CLOSE)
    assert_parity(get_model_state_dict(model, options=FULL), reference.state_dict(), exact=True)


@distributed(world_size=2, backends=TORCH)
def test_names_are_those_of_before_compilation(world: World) -> None:
    """Both ways: a compiled model writes and reads what others read and write, and takes its own state_dict() as well."""

    def compiled() -> tuple[Any, torch.optim.Optimizer]:
        model = make(world)
        model.blocks[0] = torch.compile(
            model.blocks[0], backend="eager"
        )  # nothing is called, so nothing is compiled
        shard(model, make_mesh(world))
        return torch.compile(model, backend="eager"), optim.SGD(model.parameters(), 0.1, momentum=0.9)

    plain, optimizer = trained(world, make_mesh(world), "SGD")
    weights = get_model_state_dict(plain, options=FULL)
    state = get_optimizer_state_dict(plain, optimizer, options=FULL)
    model, fresh = compiled()
    assert "_orig_mod.blocks.0._orig_mod.norm.weight" in model.state_dict()
    assert set_model_state_dict(model, weights) == ([], [])
    assert set_optimizer_state_dict(model, fresh, state) == ([], [])
    assert set_model_state_dict(model, model.state_dict()) == ([], [])
    found = get_model_state_dict(model, options=FULL)
    assert list(found) == list(weights)
    assert_parity(found, weights, exact=True)
    assert_parity(get_optimizer_state_dict(model, fresh, options=FULL)["state"], state["state"], exact=True)
    part = get_model_state_dict(
        model, submodules=[model.blocks[0]], options=StateDictOptions(True, keep_submodule_prefixes=False)
    )
    assert_parity(part, {n: weights[f"blocks.0.{n}"] for n in part}, exact=True)
    assert "norm.weight" in part
