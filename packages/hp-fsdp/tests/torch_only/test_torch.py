"""What torch users bring along: layers, optimizers, checkpointing, inference mode, files."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hp_fsdp import StateDictOptions, fully_shard, get_model_state_dict, set_model_state_dict
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, distributed

# Sums over ranks and samples in another order than in one process, float64, values near 1.
CLOSE = {"rtol": 0.0, "atol": 1e-12}


class Block(torch.nn.Module):
    def __init__(self, width: int, *, recompute: bool = False) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.inner = torch.nn.Linear(width, 2 * width)
        self.outer = torch.nn.Linear(2 * width, width)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def mlp(y: torch.Tensor) -> torch.Tensor:
            return self.outer(torch.nn.functional.gelu(self.inner(y)))

        y = self.norm(x)
        return x + (checkpoint(mlp, y, use_reentrant=False) if self.recompute else mlp(y))


class Model(torch.nn.Module):
    def __init__(self, *, recompute: str = "") -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.blocks = torch.nn.ModuleList(Block(6, recompute=recompute == "inside") for _ in range(2))
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.recompute = recompute

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute == "around" else block(x)
        return self.head(x)


def make(**kwargs: Any) -> Model:
    torch.manual_seed(3)
    return Model(**kwargs).double()


def shard(model: Model, world: World) -> Model:
    mesh = init_device_mesh(world.device_type, (world.size,))
    for block in model.blocks:
        fully_shard(block, mesh)
    return fully_shard(model, mesh)


def batch(world: World, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' samples, and this rank's."""
    ids = torch.randint(0, 11, (2 * world.size, 5), generator=torch.Generator().manual_seed(step))
    return ids, ids[2 * world.rank : 2 * world.rank + 2]


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, 1e-2, weight_decay=0.1),
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
}


@pytest.mark.parametrize("recompute", ["", "inside", "around"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@distributed(world_size=2, backends="torch")
def test_training_with_torchs_optimizers_equals_one_process(
    world: World, optimizer: str, recompute: str
) -> None:
    reference, model = make(), shard(make(recompute=recompute), world)
    ours, theirs = OPTIMIZERS[optimizer](model.parameters()), OPTIMIZERS[optimizer](reference.parameters())
    for step in range(3):
        everything, mine = batch(world, step)
        loss_of(model, mine).backward()
        loss_of(reference, everything).backward()
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert_parity(state, reference.state_dict(), **CLOSE)


@pytest.mark.parametrize("kind", [2.0, float("inf")])
@distributed(world_size=(2, 3), backends="torch")
def test_torchs_own_clipping_sees_the_norm_of_the_whole(world: World, kind: float) -> None:
    reference, model = make(), shard(make(), world)
    everything, mine = batch(world, 0)
    loss_of(model, mine).backward()
    loss_of(reference, everything).backward()
    found, wanted = (
        torch.nn.utils.clip_grad_norm_(each.parameters(), 0.01, kind) for each in (model, reference)
    )
    assert_parity(found, wanted, **CLOSE)
    assert_parity([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()], **CLOSE)


@distributed(world_size=2, backends="torch")
def test_inference_mode_before_training_does_no_harm(world: World) -> None:
    reference, model = make(), shard(make(), world)
    everything, mine = batch(world, 0)
    with torch.inference_mode():
        assert_parity(model(mine), reference(mine), **CLOSE)
    loss_of(model, mine).backward()
    loss_of(reference, everything).backward()
    wanted = reference.blocks[0].inner.bias.grad
    assert_parity(model.blocks[0].inner.bias.grad, wanted, **CLOSE)


@distributed(world_size=2, backends="torch")
def test_shards_of_one_row_are_tensors_of_their_own(world: World) -> None:
    model = shard(make(), world)
    shards = [parameter.to_local() for parameter in model.blocks[0].parameters()]
    versions = [shard._version for shard in shards]
    with torch.no_grad():
        shards[0].add_(1)
    assert [shard._version for shard in shards] == [versions[0] + 1, *versions[1:]]
    for each in shards:
        assert each.untyped_storage().nbytes() == each.numel() * each.element_size()
    assert len({each.untyped_storage().data_ptr() for each in shards}) == len(shards)


@distributed(world_size=2, backends="torch")
def test_a_saved_shard_is_as_large_as_the_shard_and_loads_safely(world: World) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(2, 2))
    fully_shard(model, init_device_mesh(world.device_type, (2,)))
    file = io.BytesIO()
    torch.save(model[1].weight.to_local(), file)
    assert file.tell() < 4000, "100 * 100 numbers of the same row have come along"
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_parity(loaded.detach(), model[1].weight.to_local().detach(), exact=True)


@distributed(world_size=2, backends="torch")
def test_a_state_dict_goes_through_a_file(world: World) -> None:
    model, file = shard(make(), world), io.BytesIO()
    torch.save(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), file)
    file.seek(0)
    plain = make()
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert_parity(plain.state_dict(), make().state_dict(), exact=True)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
    set_model_state_dict(model, plain.state_dict())
    ids, _ = batch(world, 0)
    assert_parity(model(ids), plain(ids), exact=True)


@distributed(world_size=2, backends="torch")
def test_another_dtype_after_sharding_is_refused_by_name(world: World) -> None:
    model = shard(make(), world).float()
    with pytest.raises(
        RuntimeError, match=r"the shard of parameter '.*' was changed after fully_shard: it is .*float32"
    ):
        model(batch(world, 0)[1])


@distributed(world_size=2, backends="torch")
def test_convolutions_with_buffers_equal_one_process(world: World) -> None:
    def build() -> torch.nn.Module:
        torch.manual_seed(5)
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 5, 3),
            torch.nn.BatchNorm2d(5),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(20, 3),
        ).double()

    reference, model = build(), build()
    fully_shard(model[0], init_device_mesh(world.device_type, (2,)))
    fully_shard(model, init_device_mesh(world.device_type, (2,)))
    images = torch.randn(4, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for each in (reference, model):  # the same samples on both ranks: batch statistics are per rank
        each(images).square().mean().backward()
    assert_parity(dict(model.named_buffers()), dict(reference.named_buffers()), **CLOSE)
    wanted = [p.grad for p in reference.parameters()]
    assert_parity([p.grad for p in model.parameters()], wanted, **CLOSE)


@distributed(world_size=2, backends="torch")
def test_the_readmes_example_does_what_the_readme_says(world: World) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert example is not None
    found: dict[str, Any] = {}
    exec(compile(example[1], "README.md", "exec"), found)
    # Printed as 0.0015; other builds of torch may round otherwise.
    assert abs(found["loss"].item() - 0.0015) < 1e-4
    assert len(found["state"]) == (6 if world.rank == 0 else 0)
