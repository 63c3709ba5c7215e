"""Tensor parallel blocks in fully_shard: several passes whose backwards come together, later, in another order, or never.

What ranks of a tensor-parallel group reduce, and in which order, must not depend on where memory comes back to, which every rank's
allocator decides by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hp_fsdp import fully_shard
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed
from hp_tp import parallelize_module, plan_for

WORDS, WIDTH = 37, 24


def make(torch: Any, device: str) -> Any:
    """Names that no plan knows: what is not the blocks' is whole on every rank, and computes with pieces of the sequence."""

    class Mlp(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = torch.nn.Linear(WIDTH, 48), torch.nn.Linear(48, WIDTH)

        def forward(self, x: Any) -> Any:
            return self.fc2(torch.nn.functional.gelu(self.fc1(x)))

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln, self.mlp = torch.nn.LayerNorm(WIDTH), Mlp()

        def forward(self, x: Any) -> Any:
            return x + self.mlp(self.ln(x))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok = torch.nn.Embedding(WORDS, WIDTH)
            self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
            self.norm, self.out = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WORDS, bias=False)

        def forward(self, ids: Any) -> Any:
            x = self.tok(ids)
            for layer in self.layers:
                x = layer(x)
            return self.out(self.norm(x))

    torch.manual_seed(0)
    return Model().double().to(device)


def together(loss: Callable[[], Any]) -> None:
    (loss() + loss()).backward()


def in_turn(loss: Callable[[], Any]) -> None:
    first, second = loss(), loss()
    first.backward()
    second.backward()


def in_reverse(loss: Callable[[], Any]) -> None:
    first, second = loss(), loss()
    second.backward()
    first.backward()


def one_is_dropped(loss: Callable[[], Any]) -> None:
    loss()
    (2 * loss()).backward()


@pytest.mark.parametrize("way", [together, in_turn, in_reverse, one_is_dropped])
@distributed(world_size=4, backends="torch")
def test_ranks_reduce_alike_wherever_their_memory_comes_back_to(
    world: World, way: Callable[[Callable[[], Any]], None]
) -> None:
    import torch

    mesh = init_device_mesh(world.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    model, reference = make(torch, world.device), make(torch, world.device)
    parallelize_module(model, mesh["tp"], plan_for(model))
    for layer in model.layers:
        fully_shard(layer, mesh["dp"])
    fully_shard(model, mesh["dp"])
    ids = torch.randint(WORDS, (4, 15), generator=torch.Generator().manual_seed(1)).to(world.device)
    mine = ids.chunk(2)[mesh.get_local_rank("dp")]

    def loss_of(net: Any, batch: Any) -> Any:
        scores = net(batch[:, :-1]).flatten(0, 1)
        return torch.nn.functional.cross_entropy(scores, batch[:, 1:].flatten())

    (2 * loss_of(reference, ids)).backward()
    in_the_way: list[Any] = []

    def loss() -> Any:
        found = loss_of(model, mine)
        # On every second rank others get the memory that the whole parameters have left.
        if world.rank % 2:
            in_the_way.extend(
                torch.empty(p.numel(), dtype=p.dtype, device=p.device) for p in reference.parameters()
            )
        return found

    for _ in range(4):
        with count_collectives() as counted:
            way(loss)
        counts = torch.tensor(sorted(counted.counts.values()), device=world.device)
        everybody = [torch.empty_like(counts) for _ in range(world.size)]
        torch.distributed.all_gather(everybody, counts)
        assert all(torch.equal(counts, each) for each in everybody)
        for (name, parameter), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert_parity(parameter.grad, whole.grad, rtol=1e-12, atol=1e-14, name=name)
        model.zero_grad()
        if len(in_the_way) > 60:
            in_the_way.clear()
