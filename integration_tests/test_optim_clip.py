"""Clipping of what fully_shard and tensor parallelism make of gradients, beside one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hp_dtensor import DTensor
from hp_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from hp_optim import clip_grad_norm_, get_grad_norm
from hp_optim.base import gradient_of
from hp_platform import init_device_mesh
from hp_platform.testing import World, count_collectives, distributed
from hp_tp import ColwiseParallel, RowwiseParallel, parallelize_module
from hyper_parallel.trainer.data import batch, load_corpus
from hyper_parallel.trainer.options import ModelSize

SIZE = ModelSize(dim=16, layers=2, heads=2, hidden=20, length=12)
ROWS = 12
CORPUS = load_corpus(None, SIZE.length)
WAYS = ("fsdp", "hsdp", "main_grad", "offload")


def grid_of(world: World) -> tuple[int, int]:
    return (2, world.size // 2) if world.size % 2 == 0 else (1, world.size)


class Training:
    """The decoder of the README; each rank has its rows of one batch, the mean over all is what one process has."""

    def __init__(self, world: World, way: str | None = None) -> None:
        from hyper_parallel.trainer.model import Decoder, loss_of

        self.platform, self.world, self.loss_of = world.platform, world, loss_of
        self.dtype = "float64" if world.platform.supports("float64_compute", world.device) else "float32"
        self.model = Decoder(SIZE, seed=3, dtype=self.dtype, device=world.device)
        self.ranks, self.rank = 1, 0
        if way is not None:
            self._shard(way)
        self.params = dict(self.platform.named_parameters(self.model))

    def _shard(self, way: str) -> None:
        world = self.world
        options: dict[str, Any] = {}
        mesh = init_device_mesh(world.device_type, (world.size,))
        self.ranks, self.rank = world.size, world.rank
        if way == "hsdp":
            mesh = init_device_mesh(world.device_type, grid_of(world), mesh_dim_names=("replicate", "shard"))
        if way == "main_grad":
            options = {
                "mp_policy": MixedPrecisionPolicy(reduce_dtype=self.dtype, apply_grad_on_fp32_main_grad=True)
            }
        if way == "offload":
            options = {"offload_policy": CPUOffloadPolicy()}
        for layer in self.model.layers:
            fully_shard(layer, mesh, **options)
        fully_shard(self.model, mesh, **options)

    def backward(self) -> None:
        ids, targets = batch(CORPUS, seed=5, step=0, size=ROWS, length=SIZE.length)
        size = ROWS // self.ranks
        mine = slice(self.rank * size, (self.rank + 1) * size)
        tensors = [
            self.platform.tensor(np.ascontiguousarray(x[mine]), "int64", self.world.device)
            for x in (ids, targets)
        ]
        self.platform.backward([self.loss_of(self.model, *tensors)])

    def gradients(self) -> dict[str, np.ndarray]:
        found = {}
        for name, parameter in self.params.items():
            gradient = gradient_of(parameter)
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            found[name] = self.platform.to_numpy(whole)
        return found


@pytest.mark.parametrize("way", WAYS)
@distributed(world_size=[1, 2, 3, 4], timeout=120)
def test_a_sharded_decoder_is_clipped_as_in_one_process(world: World, way: str) -> None:
    one, sharded = Training(world), Training(world, way)
    one.backward()
    sharded.backward()
    full = one.gradients()
    flat = np.concatenate([x.reshape(-1) for x in full.values()])
    # Sums over rows and ranks are made in another order: some units in the last place of gradients near 0.1.
    close = {"rtol": 1e-12, "atol": 1e-15} if one.dtype == "float64" else {"rtol": 1e-4, "atol": 1e-6}
    for p in (1, 2, np.inf):
        found = get_grad_norm(sharded.model, p)
        np.testing.assert_allclose(float(world.platform.to_numpy(found)), np.linalg.norm(flat, p), **close)
    norm = np.linalg.norm(flat)
    limit = float(norm) / 3
    with count_collectives() as counted:
        found = clip_grad_norm_(sharded.model, limit)
    is_alone = world.size == 1 or (way == "hsdp" and world.size == 2)  # two replicas of one shard
    counted.assert_counts(all_reduce=0 if is_alone else 1)
    np.testing.assert_allclose(float(world.platform.to_numpy(found)), norm, **close)
    for name, gradient in sharded.gradients().items():
        np.testing.assert_allclose(gradient, full[name] * (limit / (norm + 1e-6)), **close, err_msg=name)


@distributed(world_size=[2, 4], backends=["torch", "cuda"])
def test_layers_under_both_parallelisms_beside_layers_under_one_are_clipped_as_in_one_process(
    world: World,
) -> None:
    """The first linear layers are cut over both dims of the mesh, the last one over the dim of data parallelism only."""
    import torch

    def build() -> Any:
        torch.manual_seed(0)
        linear = [torch.nn.Linear(6, 10), torch.nn.Linear(10, 6), torch.nn.Linear(6, 3)]
        return torch.nn.Sequential(*linear).to(world.device, torch.float64)

    mesh = init_device_mesh(world.device_type, (world.size // 2, 2), mesh_dim_names=("dp", "tp"))
    one, sharded = build(), build()
    parallelize_module(sharded, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for layer in sharded:
        fully_shard(layer, mesh["dp"])
    fully_shard(sharded, mesh["dp"])
    rows = torch.tensor(np.random.default_rng(0).normal(size=(4, 6)), device=world.device)
    size = 4 // mesh.size("dp")
    mine = rows[size * mesh.get_local_rank("dp") :][:size]
    for model, x in ((one, rows), (sharded, mine)):
        model(x).square().mean().backward()
    for p in (1, 2, 3, np.inf):
        limit = 0.1
        expected = torch.nn.utils.clip_grad_norm_(one.parameters(), limit, p)
        with count_collectives() as counted:
            found = clip_grad_norm_(sharded.parameters(), limit, p)
        counted.assert_counts(all_reduce=1 if world.size == 2 else 2)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        for (name, other), parameter in zip(one.named_parameters(), sharded.parameters(), strict=True):
            assert isinstance(parameter.grad, DTensor)
            torch.testing.assert_close(
                parameter.grad.full_tensor(), other.grad, rtol=1e-12, atol=1e-15, msg=name
            )
