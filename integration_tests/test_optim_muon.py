"""Muon on what fully_shard and tensor parallelism make of parameters, beside one process."""

from __future__ import annotations

from typing import Any

import numpy as np

from hp_dtensor import DTensor
from hp_fsdp import fully_shard, get_optimizer_state_dict, set_optimizer_state_dict
from hp_optim import Muon
from hp_optim.base import gradient_of
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed
from hp_tp import ColwiseParallel, RowwiseParallel, parallelize_module
from hyper_parallel.trainer.data import batch, load_corpus
from hyper_parallel.trainer.options import ModelSize

SIZE = ModelSize(dim=16, layers=2, heads=2, hidden=20, length=12)
STEPS = 200
ROWS = 12
CORPUS = load_corpus(None, SIZE.length)


class Training:
    """The decoder of the README, whose matrices in blocks go to Muon; everything else goes downhill by plain steps."""

    def __init__(self, world: World, mesh: Any = None) -> None:
        from hyper_parallel.trainer.model import Decoder, loss_of

        self.platform, self.world, self.loss_of = world.platform, world, loss_of
        self.dtype = "float64" if world.platform.supports("float64_compute", world.device) else "float32"
        self.model = Decoder(SIZE, seed=3, dtype=self.dtype, device=world.device)
        self.ranks = 1 if mesh is None else world.size
        if mesh is not None:
            for layer in self.model.layers:
                fully_shard(layer, mesh)
            fully_shard(self.model, mesh)
        self.params = dict(self.platform.named_parameters(self.model))
        matrices = [(n, p) for n, p in self.params.items() if len(p.shape) == 2 and n.startswith("layers.")]
        self.optimizer = Muon(matrices, lr=0.005, ns_dtype=self.dtype)
        taken = {name for name, _ in matrices}
        self.others = [p for name, p in self.params.items() if name not in taken]

    def step(self, step: int) -> float:
        """The mean loss over all rows."""
        platform = self.platform
        ids, targets = batch(CORPUS, seed=5, step=step, size=ROWS, length=SIZE.length)
        size = ROWS // self.ranks
        mine = slice(self.world.rank * size, (self.world.rank + 1) * size) if self.ranks > 1 else slice(None)
        tensors = [
            platform.tensor(np.ascontiguousarray(x[mine]), "int64", self.world.device) for x in (ids, targets)
        ]
        loss = self.loss_of(self.model, *tensors)
        platform.backward([loss])
        self.optimizer.step()
        for parameter in self.others:
            platform.add_(local(platform, parameter), local(platform, gradient_of(parameter)), -0.05)
        for parameter in self.params.values():
            platform.set_grad(parameter.to_local() if isinstance(parameter, DTensor) else parameter, None)
        return float(platform.to_numpy(platform.detach(loss)))

    def whole(self) -> dict[str, np.ndarray]:
        platform = self.platform
        return {
            name: platform.to_numpy(platform.detach(p.full_tensor() if isinstance(p, DTensor) else p))
            for name, p in self.params.items()
        }


def local(platform: Any, x: Any) -> Any:
    return platform.detach(x.to_local() if isinstance(x, DTensor) else x)


def mesh_of(world: World) -> Any:
    """Two replicas of two shards on 4 ranks, else shards over all."""
    shape = (2, 2) if world.size == 4 else (world.size,)
    return init_device_mesh(world.device_type, shape)


@distributed(world_size=[1, 2, 3, 4], timeout=240)
def test_200_steps_of_a_sharded_decoder_are_those_of_one_process(world: World) -> None:
    one, sharded = Training(world), Training(world, mesh_of(world))
    steps = STEPS if one.dtype == "float64" and world.backend in ("torch", "cuda") else 10
    first = last = 0.0
    for step in range(steps):
        last = one.step(step)
        first = first or last
        sharded.step(step)
    assert steps < STEPS or last < first - 0.5, "it learns"
    # Sums over ranks are made in another order: a unit in the last place per step, which Newton-Schulz enlarges by up to 490.
    tolerance = 1e-10 if one.dtype == "float64" else 1e-3
    expected, found = one.whole(), sharded.whole()
    for name, value in expected.items():
        assert np.abs(found[name] - value).max() <= tolerance * np.abs(value).max(), name


@distributed(world_size=[2, 3])
def test_state_by_names_is_read_and_taken_again(world: World) -> None:
    platform = world.platform
    before, after = Training(world, mesh_of(world)), Training(world, mesh_of(world))
    for step in range(2):
        before.step(step)
    state = get_optimizer_state_dict(before.model, before.optimizer)
    assert set(state["state"]) == {n for n in before.params if n.startswith("layers.") and "norm" not in n}
    with platform.no_grad():
        for name, parameter in after.params.items():
            platform.copy_(local(platform, parameter), local(platform, before.params[name]))
    set_optimizer_state_dict(after.model, after.optimizer, state)
    for training in (before, after):
        training.step(2)
    for name, value in before.whole().items():
        assert np.array_equal(value, after.whole()[name]), name


@distributed(world_size=[2, 4], backends=["torch", "cuda"])
def test_tensor_parallel_layers_under_fully_shard_are_those_of_one_process(world: World) -> None:
    import torch

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(6, 10, bias=False)
            self.down = torch.nn.Linear(10, 6, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.nn.functional.gelu(self.up(x)))

    def build() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(Layers(), Layers()).to(world.device, torch.float64)

    mesh = init_device_mesh(world.device_type, (world.size // 2, 2), mesh_dim_names=("dp", "tp"))
    one, sharded = build(), build()
    for layers in sharded:
        parallelize_module(layers, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layers, mesh["dp"])
    fully_shard(sharded, mesh["dp"])
    models = {"one": one, "sharded": sharded}
    optimizers = {name: Muon(m.parameters(), ns_dtype="float64", ns_steps=8) for name, m in models.items()}
    for step in range(4):
        rows = np.random.default_rng(step).normal(size=(4, 6))
        for name, model in models.items():
            size = 4 // (mesh.shape[0] if name == "sharded" else 1)
            start = size * mesh.get_local_rank("dp") if name == "sharded" else 0
            x = torch.tensor(rows[start : start + size], device=world.device)
            model(x).square().mean().backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
    for (name, expected), found in zip(one.named_parameters(), sharded.parameters(), strict=True):
        assert isinstance(found, DTensor)
        difference = (found.full_tensor() - expected).abs().max().item()
        assert difference <= 1e-12, name
