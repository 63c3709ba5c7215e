"""What a door keeps with a tensor answers only where it is right: with and without gradients, recomputed, cast, copied, in new memory."""

from __future__ import annotations

import copy
import gc
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_dtensor import Shard
from hp_platform.testing import World, count_collectives, distributed
from hp_tp import (
    ColwiseParallel,
    ModuleCuts,
    OverlapPolicy,
    RowwiseParallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).parent.parent))
from tp_models import dtype_of, make_mesh, tolerance

BACKENDS = ("torch", "cuda", "npu")
OVERLAPS = {"plain": False, "overlap": OverlapPolicy(min_nbytes=0, features_per_peer=0, chunk_nbytes=0)}


class Gated(nn.Module):
    """Two layers that get the same tensor, and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.gate, self.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)) * self.gate(x))


def kind_of(world: World) -> dict[str, Any]:
    return {"dtype": getattr(torch, dtype_of(world)), "device": world.device}


def styled(world: World, overlap: Any = False) -> nn.Module:
    by_columns = ColwiseParallel(input_layouts=Shard(1), overlap=overlap)
    plan = {
        "up": by_columns,
        "gate": by_columns,
        "down": RowwiseParallel(output_layouts=Shard(1), overlap=overlap),
    }
    return parallelize_module(Gated().to(**kind_of(world)), make_mesh(world), plan)


def piece_and_gradient(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of an input, and of its gradient in one process."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3 * world.size, 4, generator=generator, dtype=torch.float64).to(**kind_of(world))
    Gated().to(**kind_of(world))(x.requires_grad_()).sum().backward()
    assert x.grad is not None
    return x.detach().chunk(world.size, 1)[world.rank].clone(), x.grad.chunk(world.size, 1)[world.rank]


def assert_gradient(world: World, x: torch.Tensor, expected: torch.Tensor) -> None:
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected, **tolerance(world))


@pytest.mark.parametrize("overlap", OVERLAPS)
@distributed(world_size=2, backends=BACKENDS)
def test_what_was_gathered_without_a_gradient_is_no_answer_where_one_is_recorded(
    world: World, overlap: str
) -> None:
    piece, expected = piece_and_gradient(world)
    model = styled(world, OVERLAPS[overlap])
    x = piece.clone()
    with torch.no_grad():
        model(x)
    model(x.requires_grad_()).sum().backward()
    assert_gradient(world, x, expected)
    leaf = piece.clone().requires_grad_()
    computed = leaf * 1
    with torch.no_grad():
        model(computed)
    assert not hasattr(computed, "_hp_tp_shared")  # it outlives the call, and what was gathered would, too
    model(computed).sum().backward()
    assert_gradient(world, leaf, expected)


@pytest.mark.parametrize("overlap", OVERLAPS)
@distributed(world_size=2, backends=BACKENDS)
def test_layers_that_gather_the_input_of_a_checkpoint_are_recomputed(world: World, overlap: str) -> None:
    piece, expected = piece_and_gradient(world)
    found = []
    for use_reentrant in (None, False, True):
        model, leaf = styled(world, OVERLAPS[overlap]), piece.clone().requires_grad_()
        x = leaf * 1
        y = model(x) if use_reentrant is None else checkpoint(model, x, use_reentrant=use_reentrant)
        y.sum().backward()
        assert_gradient(world, leaf, expected)
        found.append([p.grad.full_tensor() for p in model.parameters()])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, **tolerance(world))


def bytes_of_wholes(shape: tuple[int, ...]) -> int:
    """Of all living tensors of this shape, each memory once."""
    gc.collect()
    # Looking for a class asks some objects of torch for what they warn of.
    found = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and type(x) is torch.Tensor]
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found if x.shape == shape
    }
    return sum(storages.values())


@pytest.mark.parametrize("overlap", OVERLAPS)
@distributed(world_size=2, backends=BACKENDS)
def test_layers_that_are_recomputed_leave_no_gathered_inputs_behind(world: World, overlap: str) -> None:
    """Of four layers that gather their inputs at once, one whole input is there at a time: after forward, and while it runs backward."""
    piece = piece_and_gradient(world)[0]
    layers = [styled(world, OVERLAPS[overlap]) for _ in range(4)]
    shape = (piece.shape[0], piece.shape[1] * world.size, piece.shape[2])
    nbytes = math.prod(shape) * piece.element_size()
    seen: list[int] = []
    hidden = piece.clone().requires_grad_() * 1
    hidden.register_hook(lambda _: seen.append(bytes_of_wholes(shape)))
    with count_collectives() as counted:
        for layer in layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
            hidden.register_hook(lambda _: seen.append(bytes_of_wholes(shape)))
    assert counted.counts["all_gather"] == len(layers)
    assert bytes_of_wholes(shape) <= nbytes
    with count_collectives() as counted:
        hidden.sum().backward()
    assert counted.counts["all_gather"] == 2 * len(
        layers
    )  # recomputed, and backwards of what was reduced and scattered
    # The first was there before any was recomputed; behind each layer are its own whole and the gradient of it.
    assert len(seen) == 5
    assert max(seen) <= 2 * nbytes


@distributed(world_size=2, backends=BACKENDS)
def test_other_memory_under_a_tensor_is_gathered_again(world: World) -> None:
    piece, _ = piece_and_gradient(world)
    model, x = styled(world), piece.clone()
    with torch.no_grad():
        model(x)
        expected = model(piece * 2)
        x.data = piece * 2
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("overlap", OVERLAPS)
@distributed(world_size=2, backends=BACKENDS)
def test_a_buffer_that_is_filled_without_being_counted_is_read_at_every_call(
    world: World, overlap: str
) -> None:
    piece, _ = piece_and_gradient(world)
    model, x = styled(world, OVERLAPS[overlap]), piece.clone()
    with torch.no_grad():
        for factor in (1, 2, 3):
            before = x._version
            x.data.copy_(piece * factor)
            assert x._version == before
            with count_collectives() as counted:
                y = model(x)
            assert counted.counts["all_gather"] == 1
            torch.testing.assert_close(y, model(piece * factor), **tolerance(world))


@distributed(world_size=2, backends=("torch", "cuda", "npu"))
def test_a_copy_of_a_tensor_begins_with_nothing_kept(world: World) -> None:
    piece, expected = piece_and_gradient(world)
    model, x = styled(world), piece.clone().requires_grad_()
    y = model(x)
    twin = copy.deepcopy(x)
    model(twin).sum().backward()
    assert_gradient(world, twin, expected)
    assert x.grad is None
    y.sum().backward()
    assert_gradient(world, x, expected)


@distributed(world_size=2, backends=("torch", "cuda"))
def test_what_autocast_has_cast_is_not_given_to_layers_outside_of_it(world: World) -> None:
    model = styled(world, OVERLAPS["overlap"]).float()
    x = piece_and_gradient(world)[0].float().requires_grad_() * 1
    with torch.autocast(world.device_type, torch.bfloat16):
        assert model.up(x).dtype == torch.bfloat16
    assert model.gate(x).dtype == torch.float32


@distributed(world_size=2, backends=BACKENDS)
def test_a_linear_layer_with_cuts_of_its_own_is_cut_by_them(world: World) -> None:
    """A whole bias that is not said to be added after is a part of every rank's summand."""
    layer = nn.Linear(4, 6).to(**kind_of(world))
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.fill_(3.0)
    style = RowwiseParallel(cuts=ModuleCuts({"weight": 1, "bias": None}))
    parallelize_module(layer, make_mesh(world), style)
    y = layer(torch.ones(5, 2, **kind_of(world)))
    assert torch.equal(y, torch.full_like(y, 4.0 + 2 * 3.0))
