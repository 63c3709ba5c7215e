"""The chain of AdamW and Muon on what fully_shard and tensor parallelism make of a model: routing, states by names, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_dtensor import DTensor, load, save
from hp_fsdp import (
    StateDictOptions,
    fully_shard,
    get_optimizer_state_dict,
    like_parameters,
    set_optimizer_state_dict,
)
from hp_optim import (
    clip_grad_norm_,
    get_hyper_lr_scheduler,
    get_hyper_optimizer,
    route_parameters,
    show_routing,
)
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed
from hp_tp import ColwiseParallel, RowwiseParallel, parallelize_module
from hyper_parallel.trainer.data import batch, load_corpus
from hyper_parallel.trainer.options import ModelSize

SIZE = ModelSize(dim=8, layers=2, heads=2, hidden=10, length=6)
ROWS = 12
CORPUS = load_corpus(None, SIZE.length)
WHOLE = StateDictOptions(full_state_dict=True)


class Training:
    """The decoder of the README, sharded over a mesh, under a chain; one norm asks for no gradient until it is let."""

    def __init__(self, world: World, mesh: Any, *, steps: int = 0) -> None:
        from hyper_parallel.trainer.model import Decoder, loss_of

        self.platform, self.mesh, self.world, self.loss_of = world.platform, mesh, world, loss_of
        dtype = "float64" if world.platform.supports("float64_compute", world.device) else "float32"
        self.model = Decoder(SIZE, seed=3, dtype=dtype, device=world.device)
        for layer in self.model.layers:
            fully_shard(layer, mesh)
        fully_shard(self.model, mesh)
        self.params = dict(self.platform.named_parameters(self.model))
        self.late = "layers.1.attention_norm.weight"
        self.chain = get_hyper_optimizer(
            self.model,
            muon_kwargs={"lr": 0.01, "ns_dtype": dtype},
            adamw_kwargs={"lr": 0.01, "betas": (0.5, 0.75)},
        )
        for step in range(steps):
            self.step(step)

    def backward(self, step: int, *, late: bool = False) -> None:
        ids, targets = batch(CORPUS, seed=5, step=step, size=ROWS, length=SIZE.length)
        number = len(self.mesh.rank_list)
        place = sorted(self.mesh.rank_list).index(self.world.rank)
        mine = slice(place * (ROWS // number), (place + 1) * (ROWS // number))
        tensors = [
            self.platform.tensor(np.ascontiguousarray(x[mine]), "int64", self.world.device)
            for x in (ids, targets)
        ]
        self.platform.backward([self.loss_of(self.model, *tensors)])
        if not late:
            self.params[self.late].grad = None

    def step(self, step: int, *, late: bool = False) -> None:
        self.backward(step, late=late)
        self.chain.step()
        self.chain.zero_grad()

    def take_parameters(self, other: Training) -> None:
        for name, parameter in self.params.items():
            self.platform.copy_(parameter.to_local(), self.platform.detach(other.params[name].to_local()))

    def whole(self) -> dict[str, Any]:
        return {name: self.platform.detach(p.full_tensor()) for name, p in self.params.items()}

    def whole_state(self) -> dict[str, Any]:
        """Read by hp-fsdp, which has tests of its own."""
        state: dict[str, Any] = get_optimizer_state_dict(self.model, self.chain, options=WHOLE)["state"]
        return state


def line(world: World) -> DeviceMesh:
    return init_device_mesh(world.device_type, (world.size,), mesh_dim_names=("dp",))


def meshes(world: World) -> list[DeviceMesh]:
    """All ranks shard; and, on an even number of them, two replicas."""
    found = [line(world)]
    if world.size % 2 == 0:
        names = ("replicate", "shard")
        found.append(init_device_mesh(world.device_type, (2, world.size // 2), mesh_dim_names=names))
    return found


def seen(platform: Any, training: Training) -> list[Any]:
    """Objects, memory, values and devices of parameters, gradients and state."""

    def fingerprint(x: Any) -> Any:
        if not platform.is_tensor(x):
            return x
        local = platform.detach(x.to_local() if isinstance(x, DTensor) else x)
        place = getattr(x, "placements", None)
        return (
            id(x),
            place,
            platform.data_ptr(local),
            platform.device_of(local),
            platform.to_numpy(local).tobytes(),
        )

    found: list[Any] = []
    for optimizer in training.chain:
        found.append({id(p): {k: fingerprint(v) for k, v in e.items()} for p, e in optimizer.state.items()})
        for group in optimizer.param_groups:
            found.append({key: fingerprint(value) for key, value in group.items() if key != "params"})
            found.extend(fingerprint(p) for p in group["params"])
            found.extend(fingerprint(p.grad) for p in group["params"])
    return found


@distributed(world_size=(1, 2, 4), timeout=180)
def test_reading_moves_sends_and_makes_nothing(world: World) -> None:
    for mesh in meshes(world):
        training = Training(world, mesh, steps=2)
        training.backward(2)
        before = seen(world.platform, training)
        with count_collectives() as counted:
            read = training.chain.state_dict()
        counted.assert_counts()
        assert seen(world.platform, training) == before
        assert f"param_groups.{training.late}.lr" in read
        assert not any(key.startswith(f"state.{training.late}.") for key in read)
        values = {key: value for key, value in read.items() if key.startswith("state.")}
        assert len(values) > len(training.params) and any(isinstance(v, DTensor) for v in values.values())
        for key, value in values.items():
            name, _, kind = key.removeprefix("state.").rpartition(".")
            assert value is training.chain.state[training.params[name]][kind]


@distributed(world_size=(1, 2, 4), timeout=240)
def test_hp_fsdp_reads_and_loads_a_chain_as_the_chain_does(world: World) -> None:
    for mesh in meshes(world):
        training = Training(world, mesh, steps=2)
        training.chain.flatten = False
        shards = get_optimizer_state_dict(training.model, training.chain)
        own = training.chain.state_dict()
        assert shards["param_groups"] == own["param_groups"]
        for name, entry in own["state"].items():
            assert all(shards["state"][name][key] is value for key, value in entry.items())
        whole = get_optimizer_state_dict(training.model, training.chain, options=WHOLE)
        again = [Training(world, mesh, steps=steps) for steps in (0, 1, 0, 0)]
        assert set_optimizer_state_dict(again[0].model, again[0].chain, shards) == ([], [])
        assert set_optimizer_state_dict(again[1].model, again[1].chain, whole) == ([], [])
        again[2].chain.load_state_dict(whole)
        again[3].chain.flatten = True
        again[3].chain.load_state_dict(shards)
        for other in again:
            other.take_parameters(training)
        for step, late in ((2, False), (3, True), (4, True)):
            for each in (training, *again):
                each.step(step, late=late)
        for other in again:
            assert_parity(other.whole(), training.whole(), exact=True)
            assert_parity(other.whole_state(), training.whole_state(), exact=True)


@distributed(world_size=4, timeout=300)
def test_checkpoints_go_from_any_number_of_ranks_to_any_other_bit_by_bit(
    world: World, tmp_path: Path
) -> None:
    """Saved on all ranks (of which half are replicas), read by every smaller number, saved there, and read by all again."""
    for number, mesh in enumerate(meshes(world)):
        path = tmp_path / str(number)
        training = Training(world, mesh, steps=2)
        save({"optimizer": training.chain.state_dict()}, path / "all")
        expected = training.whole_state()
        assert training.late not in expected
        for size in range(1, world.size):
            smaller = DeviceMesh(world.device_type, list(range(size)), mesh_dim_names=("dp",))
            written: dict[str, Any] = {}
            if world.rank < size:
                part = Training(world, smaller)
                part.chain.load_state_dict(load(path / "all", like=part.chain.like)["optimizer"])
                assert_parity(part.whole_state(), expected, exact=True)
                assert {group["step"] for group in part.chain.param_groups} == {2}
                written = part.chain.state_dict()
            save({"optimizer": written}, path / str(size))
            again = Training(world, mesh)
            like = like_parameters(again.model) if size == 1 else again.chain.like
            again.chain.load_state_dict(load(path / str(size), like=like)["optimizer"])
            assert_parity(again.whole_state(), expected, exact=True)
        again.take_parameters(training)
        for each in (training, again):
            each.step(2)
            each.step(3, late=True)
        assert_parity(again.whole(), training.whole(), exact=True)


@distributed(world_size=(1, 2), timeout=120)
def test_a_chain_is_clipped_scheduled_and_goes_on(world: World) -> None:
    training = Training(world, line(world))
    schedule = get_hyper_lr_scheduler(training.chain, 10, warmup_steps=2, lr=0.01, lr_min=0.001)
    assert list(schedule.schedulers_dict) == ["adamw", "muon"]
    for step in range(3):
        training.backward(step, late=True)
        before = clip_grad_norm_(training.params.values(), 0.125)
        after = clip_grad_norm_(training.params.values(), 1e9)
        assert float(before) > 0.125 and float(after) < 0.1251
        training.chain.step()
        training.chain.zero_grad()
        schedule.step()
    assert schedule.get_last_lr() == [group["lr"] for group in training.chain.param_groups]


@distributed(world_size=(2, 4), timeout=120)
def test_the_routing_of_a_sharded_model_is_that_of_the_whole_one(world: World) -> None:
    from hyper_parallel.trainer.model import Decoder

    whole = route_parameters(Decoder(SIZE, seed=3, dtype="float32", device=world.device))
    for mesh in meshes(world):
        sharded = Training(world, mesh)
        found = route_parameters(sharded.model)
        assert [(r.name, r.shape, r.optimizer, r.why) for r in found] == [
            (r.name, r.shape, r.optimizer, r.why) for r in whole
        ]
        assert all(route.placements for route in found)
        assert str(found) == show_routing(sharded.model) == str(sharded.chain.routing)
    assert {r.name: r.why for r in whole if r.optimizer == "adamw"} == {
        "embedding": "embedding",
        "head": "head",
        **{r.name: "vector" for r in whole if "norm" in r.name},
    }


@pytest.mark.parametrize("compiled", [False, True])
@distributed(world_size=(2, 4), backends=["torch", "cuda"], timeout=180)
def test_tensor_parallel_compiled_layers_are_routed_and_saved_by_their_own_names(
    world: World, compiled: bool, tmp_path: Path
) -> None:
    import torch

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(6, 10)
            self.down = torch.nn.Linear(10, 6, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.nn.functional.gelu(self.up(x)))

    mesh = init_device_mesh(world.device_type, (world.size // 2, 2), mesh_dim_names=("dp", "tp"))

    def build(steps: int) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(Layer(), Layer()).to(world.device, torch.float64)
        for number, layer in enumerate(model):
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if compiled:
                model[number] = torch.compile(layer, backend="eager")
            fully_shard(model[number], mesh["dp"])
        fully_shard(model, mesh["dp"])
        chain = get_hyper_optimizer(model, muon_kwargs={"ns_dtype": "float64"})
        for step in range(steps):
            torch.manual_seed(10 + step)
            for parameter in model.parameters():
                whole = torch.randn(tuple(parameter.shape), dtype=torch.float64, device=world.device)
                parameter.grad = distributed_like(whole, parameter)
            chain.step()
        return model, chain

    _, chain = build(2)
    names = {f"{i}.{part}" for i in (0, 1) for part in ("up.weight", "up.bias", "down.weight")}
    assert {route.name for route in chain.routing} == names
    assert set(chain.routing.names("adamw")) == {"0.up.bias", "1.up.bias"}
    assert "tp: " in str(chain.routing)
    save({"optimizer": chain.state_dict()}, tmp_path)
    _, other = build(0)
    other.load_state_dict(load(tmp_path, like=other.like)["optimizer"])
    for mine, theirs in zip(other.param_groups, chain.param_groups, strict=True):
        for p, q in zip(mine["params"], theirs["params"], strict=True):
            for key, value in chain.state[q].items():
                assert_parity(other.state[p][key].full_tensor(), value.full_tensor(), exact=True)


def distributed_like(whole: Any, parameter: Any) -> Any:
    """The whole tensor, cut as the parameter is; equal on all ranks."""
    from hp_dtensor import distribute_tensor

    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)
