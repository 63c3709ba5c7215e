"""What torch users bring along: layers with buffers, inference mode, files, memory of shards, the readme's example."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_fsdp import StateDictOptions, fully_shard, get_model_state_dict, set_model_state_dict
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from torch_models import CLOSE, batch, loss_of, make, make_mesh, shard


@distributed(world_size=2, backends="torch")
def test_inference_mode_before_training_does_no_harm(world: World) -> None:
    reference, model = make(world), shard(make(world), make_mesh(world))
    everything, mine = batch(world, 0)
    with torch.inference_mode():
        assert_parity(model(mine), reference(mine), **CLOSE)
    loss_of(model, mine).backward()
    loss_of(reference, everything).backward()
    wanted = reference.blocks[0].inner.bias.grad
    assert_parity(model.blocks[0].inner.bias.grad, wanted, **CLOSE)


@distributed(world_size=2, backends="torch")
def test_shards_of_one_row_are_tensors_of_their_own(world: World) -> None:
    model = shard(make(world), make_mesh(world))
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
    model, file = shard(make(world), make_mesh(world)), io.BytesIO()
    torch.save(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), file)
    file.seek(0)
    plain = make(world)
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert_parity(plain.state_dict(), make(world).state_dict(), exact=True)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
    set_model_state_dict(model, plain.state_dict())
    ids, _ = batch(world, 0)
    assert_parity(model(ids), plain(ids), exact=True)


@distributed(world_size=2, backends="torch")
def test_another_dtype_after_sharding_is_refused_by_name(world: World) -> None:
    model = shard(make(world), make_mesh(world)).float()
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


@distributed(world_size=2, backends="torch")
def test_a_lazy_layer_is_refused_by_name_until_it_has_its_sizes(world: World) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LazyLinear(4)).double()
    with pytest.raises(
        ValueError, match=r"parameter '1\.weight' of Sequential has no shape yet: call the module once"
    ):
        fully_shard(model, make_mesh(world))
    x = torch.ones(2, 3, dtype=torch.float64)
    expected = model(x)
    fully_shard(model, make_mesh(world))
    assert_parity(model(x), expected, **CLOSE)
