"""Models on the meta device: sharded there, given memory by torch's own to_empty, then values; never a whole tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hp_dtensor import DTensor, random
from hp_fsdp import StateDictOptions, fully_shard, get_model_state_dict, set_model_state_dict
from hp_platform.testing import World, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parents[1]))
from fsdp_models import make_mesh

TORCH = ("torch", "cuda")
ROWS, WIDTH = 29, 24


class Model(torch.nn.Module):
    """Tied; torch's own layers, and a table that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(ROWS, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = torch.nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.table.copy_(torch.arange(float(WIDTH), device=self.table.device) / WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.table
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.norm(x))


def by_reset(model: torch.nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def by_functions(model: torch.nn.Module) -> None:
    """As recipes do: by kinds of modules, with scaled normals; the head, which is tied, last."""

    def initialise(module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.kaiming_normal_(module.weight, a=0.5)
            if module.bias is not None:
                torch.nn.init.constant_(module.bias, 0.125)
        elif isinstance(module, torch.nn.Embedding):
            torch.nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, torch.nn.LayerNorm):
            module.reset_parameters()

    model.apply(initialise)
    torch.nn.init.xavier_uniform_(model.head.weight)  # type: ignore[arg-type]
    model.reset_parameters()  # type: ignore[operator]


INITIALISERS: dict[str, Callable[[Any], None]] = {"by reset": by_reset, "by functions": by_functions}


class Sizes(TorchDispatchMode):
    """How many elements the largest tensor with memory has that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        made = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor) and not x.is_meta]
        self.largest = max([self.largest, *made])
        return result


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def shard(model: Model, mesh: Any, **options: Any) -> Model:
    for block in model.blocks:
        fully_shard(block, mesh, **options)
    return fully_shard(model, mesh, **options)


def one_process(world: World, initialise: Callable[[Any], None], seed: int) -> Model:
    model = Model().to(world.device)
    random.manual_seed(seed)
    with random.global_draws():
        initialise(model)
    return model


def assert_same(model: Model, reference: Model) -> None:
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in reference.state_dict().items():
        assert torch.equal(found[name].to(value.device), value), name


@pytest.mark.parametrize("way", list(INITIALISERS))
@distributed(world_size=(1, 2, 4), backends=TORCH)
def test_values_are_those_of_one_process_and_no_rank_makes_a_whole_parameter(world: World, way: str) -> None:
    mesh, initialise = make_mesh(world), INITIALISERS[way]
    with Sizes() as sizes, count_collectives() as counted:
        model = shard(on_meta(), mesh)
        before = list(model.parameters())
        model.to_empty(device=world.device)
        random.manual_seed(3)
        initialise(model)
    counted.assert_counts()
    longest = -(-ROWS // world.size)
    assert sizes.largest <= longest * WIDTH, "the piece of the largest parameter"
    assert model.head.weight is model.embed.weight
    assert not any(p is q for p in model.parameters() for q in before), "torch makes new ones"
    assert all(isinstance(p, DTensor) and p.requires_grad and p.is_leaf for p in model.parameters())
    reference = one_process(world, initialise, 3)
    assert_same(model, reference)

    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    batches = [torch.arange(4 * r, 4 * r + 4, device=world.device) for r in range(world.size)]
    for _ in range(2):
        model(batches[world.rank]).square().mean().backward()
        torch.stack([reference(ids).square().mean() for ids in batches]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert model.head.weight is model.embed.weight
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in reference.state_dict().items():
        # float32: sums over samples and ranks in another order, two steps.
        torch.testing.assert_close(found[name].to(value.device), value, rtol=1e-5, atol=1e-6, msg=name)


@distributed(world_size=2, backends=TORCH)
def test_a_model_that_holds_sharded_modules_is_given_memory_as_a_whole(world: World) -> None:
    """to_empty of an outer module that is not sharded itself; and of replicas, other dims, several modules as one unit."""
    mesh = make_mesh(world)
    model = on_meta()
    outer = torch.nn.Sequential(shard(model, mesh, replicate_params=[model.norm.weight]))
    outer.to_empty(device=world.device)
    random.manual_seed(4)
    by_reset(model)
    assert model.head.weight is model.embed.weight
    assert_same(model, one_process(world, by_reset, 4))

    model = on_meta()
    fully_shard([model.embed, model.norm, model.head], mesh)
    model.to_empty(device=world.device)
    assert model.head.weight is model.embed.weight
    random.manual_seed(4)
    with random.global_draws():  # the blocks are not sharded
        by_reset(model)
    assert model.head.weight is model.embed.weight
    assert_same(model, one_process(world, by_reset, 4))


@distributed(world_size=2, backends=TORCH)
def test_values_are_loaded_after_to_empty(world: World) -> None:
    reference = one_process(world, by_functions, 5)
    model = shard(on_meta(), make_mesh(world))
    with pytest.raises(RuntimeError, match="on the meta device"):
        set_model_state_dict(model, reference.state_dict())
    with pytest.raises(RuntimeError, match=r"have no values: embed\.weight, .*table\. After fully_shard"):
        model(torch.arange(3, device=world.device))
    model.to_empty(device=world.device)
    missing, unexpected = set_model_state_dict(model, reference.state_dict())
    assert not missing
    assert not unexpected
    model.reset_parameters()  # the table is in no state dict
    assert_same(model, reference)
    ids = torch.arange(3, device=world.device)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), reference(ids), rtol=0.0, atol=0.0)
    # Moving there where it is changes nothing, and what an optimizer knows stays.
    parameters = list(model.parameters())
    model.to(world.device)
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))


@distributed(world_size=2, backends=TORCH)
def test_a_block_that_was_forgotten_is_named(world: World) -> None:
    model = shard(on_meta(), make_mesh(world))
    for module in (model.embed, model.norm, model.head, model.blocks[0]):
        module.to_empty(device=world.device)
    model.register_buffer("table", torch.zeros(WIDTH, device=world.device))
    with pytest.raises(RuntimeError, match=r"no values: blocks\.1\.weight, blocks\.1\.bias\. After"):
        model(torch.arange(3, device=world.device))
