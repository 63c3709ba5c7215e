"""Clipping beside torch's own, of the full gradients, to the last bits; and what the host does on cuda."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_optim import clip_grad_norm_, get_grad_norm
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed

SHAPES = [(5, 3), (1, 4), (7,), (2, 3, 4), ()]


def twins(world: World, dtype: torch.dtype = torch.float64) -> tuple[list[Any], list[Any]]:
    """Parameters in every way of lying on a 1-D and a 2-D mesh, and plain ones with the full gradients."""
    line = init_device_mesh(world.device_type, (world.size,), mesh_dim_names=("dp",))
    sizes = (2, world.size // 2) if world.size % 2 == 0 else (1, world.size)
    grid = init_device_mesh(world.device_type, sizes, mesh_dim_names=("edp", "ep"))
    ways = [
        (line, [Shard(0)]),
        (line, [Replicate()]),
        (grid, [Shard(0), Shard(0)]),
        (grid, [Replicate(), Shard(0)]),
        (grid["ep"], [Shard(0)]),
    ]
    random = torch.Generator().manual_seed(5)
    placed, plain = [], []
    for shape in SHAPES:
        for mesh, placements in ways if shape else ways[1:2]:
            gradient = torch.randn(shape, generator=random, dtype=dtype).to(world.device)
            parameter = distribute_tensor(torch.zeros_like(gradient), mesh, placements).requires_grad_()
            parameter.grad = distribute_tensor(gradient, mesh, placements)
            other = torch.nn.Parameter(torch.zeros_like(gradient))
            other.grad = gradient.clone()
            placed.append(parameter)
            plain.append(other)
    return placed, plain


@pytest.mark.parametrize("p", [1, 2, 3, "inf", -np.inf])
@distributed(world_size=(1, 2, 3, 4), backends=("torch", "cuda"))
def test_norms_and_gradients_are_those_of_torch(world: World, p: Any) -> None:
    placed, plain = twins(world)
    for limit in (0.01, 1e6):
        total = clip_grad_norm_(placed, limit, p)
        expected = torch.nn.utils.clip_grad_norm_(plain, limit, p)
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
        for parameter, other in zip(placed, plain, strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), other.grad, rtol=1e-12, atol=0)


@distributed(world_size=2, backends=("torch", "cuda"))
def test_the_clipping_of_torch_refuses_meshes_of_different_ranks_and_names_ours(world: World) -> None:
    line = init_device_mesh(world.device_type, (2,))
    alone = init_device_mesh(world.device_type, (2, 1), mesh_dim_names=("dp", "tp"))["tp"]
    parameters, plain = [], []
    for mesh in (line, alone):
        parameters.append(distribute_tensor(torch.zeros(4, 3, device=world.device), mesh).requires_grad_())
        parameters[-1].grad = distribute_tensor(torch.ones(4, 3, device=world.device), mesh)
        plain.append(torch.nn.Parameter(torch.zeros(4, 3)))
        plain[-1].grad = torch.ones(4, 3)
    with pytest.raises(
        ValueError, match=r"on two meshes.*norms of gradients on several meshes: hp_optim.clip_grad_norm_"
    ):
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    expected = torch.nn.utils.clip_grad_norm_(plain, 1.0)
    torch.testing.assert_close(clip_grad_norm_(parameters, 1.0).cpu(), expected)


# Said once per process, whatever is done then.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@distributed(world_size=(1, 2), backends="cuda")
def test_the_host_does_not_wait_for_the_device(world: World) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        placed, _ = twins(world, dtype)
        for p in (0, 1, 2, 3, np.inf, -np.inf):
            clip_grad_norm_(placed, 1.0, p)
            torch.cuda.set_sync_debug_mode("error")
            try:
                clip_grad_norm_(placed, 1.0, p)
                get_grad_norm(placed, p)
            finally:
                torch.cuda.set_sync_debug_mode("default")


class Counter(TorchDispatchMode):
    """Counts what is launched: operations of torch that compute, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view:
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@distributed(world_size=(1, 2), backends=("torch", "cuda"))
def test_the_number_of_launches_does_not_grow_with_the_number_of_gradients(
    world: World, dtype: torch.dtype
) -> None:
    """Empty memory that a list is widened into is no launch, so it is left out."""
    mesh = init_device_mesh(world.device_type, (world.size,))

    def launches(num: int) -> list[str]:
        parameters = []
        for placement in (Shard(0), Replicate()) * num:
            values = torch.ones(8, 2, dtype=dtype, device=world.device)
            parameter = distribute_tensor(values, mesh, [placement]).requires_grad_()
            parameter.grad = distribute_tensor(values, mesh, [placement])
            parameters.append(parameter)
        clip_grad_norm_(parameters, 1.0)
        with Counter() as counted:
            clip_grad_norm_(parameters, 1.0)
        return [name for name in counted.names if "empty" not in name]

    few, many = launches(2), launches(20)
    assert few == many
    assert len(many) <= 25, many


@distributed(world_size=1, backends="torch")
def test_a_sparse_gradient_is_refused_and_nothing_is_scaled(world: World) -> None:
    embedding, dense = torch.nn.Embedding(5, 4, sparse=True), torch.nn.Linear(4, 3)
    dense(embedding(torch.tensor([1, 3]))).sum().backward()
    before = dense.weight.grad.clone()
    for function, limit in ((clip_grad_norm_, (0.1,)), (get_grad_norm, ())):
        with pytest.raises(
            ValueError, match=rf"{function.__name__}: a gradient of shape \(5, 4\) is sparse; .*sparse=False"
        ):
            function([*dense.parameters(), *embedding.parameters()], *limit)
    assert torch.equal(dense.weight.grad, before)
