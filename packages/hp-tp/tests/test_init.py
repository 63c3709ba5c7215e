"""A tensor parallel model is initialised as in one process: from meta, in place, and by random functions of any kind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import (
    DTensor,
    Shard,
    init_empty_weights,
    init_parameters,
    manual_seed,
    parallelize_module,
    random,
)
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed
from hp_tp import ColwiseParallel, Linear2DParallel, RowwiseParallel, SequenceParallel

sys.path.insert(0, str(Path(__file__).parent))
from tp_models import Maker, dtype_of, make_mesh
from tp_training import local, whole_parameters

WIDTH = 6
PLANS: dict[str, dict[str, Any]] = {
    "tensor": {
        "embed": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(use_local_output=False),
    },
    "tensor and sequence": {
        "embed": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(use_local_output=False),
    },
    "embedding by columns": {"embed": ColwiseParallel(), "head": RowwiseParallel()},
}


def model(world: World, vocabulary: int, hidden: int, tied: bool = False) -> Any:
    """Stock layers, as their constructors leave them."""
    platform, stock = world.platform, Maker(world).stock

    class Model(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = stock.Embedding(vocabulary, WIDTH)
            self.norm = stock.LayerNorm((WIDTH,))
            self.up, self.down = stock.Linear(WIDTH, hidden), stock.Linear(hidden, WIDTH)
            self.head = stock.Linear(WIDTH, vocabulary, bias=False)
            if tied:
                platform.set_parameter(self.head, "weight", platform.get_parameter(self.embed, "weight"))

        def forward(self, ids: Any) -> Any:
            x = self.embed(ids)
            return self.head(x + self.down(platform.silu(self.up(self.norm(x)))))

    return Model()


@pytest.mark.parametrize("name", list(PLANS))
@distributed(world_size=[1, 2, 3, 4])
def test_built_on_meta_it_gets_the_values_of_one_process_at_the_size_of_its_pieces(
    world: World, name: str
) -> None:
    platform = world.platform
    for vocabulary, hidden in ((50, 8), (7, 5), (3, 2)):
        with init_empty_weights():
            plain, sharded = (model(world, vocabulary, hidden) for _ in range(2))
        manual_seed(5)
        init_parameters(plain, device=world.device)
        mesh = make_mesh(world)
        with count_collectives() as counted:
            parallelize_module(sharded, mesh, PLANS[name])
            manual_seed(5)
            init_parameters(sharded)
        counted.assert_counts()
        assert_parity(
            whole_parameters(platform, sharded),
            whole_parameters(platform, plain),
            exact=True,
            name=f"{name}, vocabulary {vocabulary}, hidden {hidden}",
        )
        assert all(
            platform.device_of(local(p)) == world.device for _, p in platform.named_parameters(sharded)
        )


@distributed(world_size=[2, 3])
def test_tied_weights_on_meta_stay_one_parameter(world: World) -> None:
    platform = world.platform
    with init_empty_weights():
        plain, sharded = (model(world, 5, 4, tied=True) for _ in range(2))
    manual_seed(5)
    init_parameters(plain, device=world.device)
    parallelize_module(sharded, make_mesh(world), PLANS["tensor"])
    manual_seed(5)
    init_parameters(sharded)
    assert sharded.embed.weight is sharded.head.weight
    assert_parity(whole_parameters(platform, sharded), whole_parameters(platform, plain), exact=True)


@distributed(world_size=[1, 2, 3, 4])
def test_fused_projections_in_parts_get_the_rows_of_one_process(world: World) -> None:
    """Of a layer on meta, and of one within a module that writes it again; heads that divide and those that do not; no rows at all."""
    platform = world.platform
    heads = {"q": 12, "k": 3, "v": 3}

    class Attention(platform.Module):
        def __init__(self, layer: Any, again: bool) -> None:
            super().__init__()
            self.qkv = layer
            if again:
                self.reset_parameters = lambda: random.normal_(layer.bias, 1.0, 0.1)

    for sizes, more in (
        ({"q": 6, "k": 4, "v": 2}, {}),
        ({"q": 1, "k": 1, "v": 3}, {}),
        ({"q": 24, "k": 6, "v": 6}, {"heads": heads, "query_heads": 12, "replicate_kv": True}),
    ):
        for again in (False, True):
            with init_empty_weights():
                plain, sharded = (
                    Attention(Maker(world).stock.Linear(5, sum(sizes.values())), again) for _ in range(2)
                )
            parallelize_module(sharded, make_mesh(world), {"qkv": ColwiseParallel(parts=sizes, **more)})
            seen = []
            for net in (plain, sharded):
                manual_seed(5)
                init_parameters(net, device=world.device if net is plain else None)
                seen.append(random.get_state())
            expected, found = (whole_parameters(platform, net) for net in (plain, sharded))
            for name in ("weight", "bias"):
                rows = platform.split(expected[f"qkv.{name}"], list(sizes.values()))
                for part, row in zip(sizes, rows, strict=True):
                    assert_parity(found.pop(f"qkv.{name}_{part}"), row, exact=True, name=f"{name} of {part}")
            assert not found
            assert sharded.qkv.weight is None
            assert seen[0] == seen[1]


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda x: random.normal_(x, 0.0, 0.02),
    "uniform_": lambda x: random.uniform_(x, -0.1, 0.1),
    "trunc_normal_": lambda x: random.trunc_normal_(x, std=0.02),
    "kaiming_uniform_": lambda x: random.kaiming_uniform_(x, a=5**0.5),
    "kaiming_normal_": lambda x: random.kaiming_normal_(x, mode="fan_out", nonlinearity="relu"),
    "xavier_uniform_": lambda x: random.xavier_uniform_(x),
    "xavier_normal_": lambda x: random.xavier_normal_(x, gain=2.0),
}


@distributed(world_size=[1, 2, 3, 4])
def test_weights_that_are_written_after_parallelizing_are_those_of_one_process(world: World) -> None:
    platform = world.platform
    sizes = ((8, 12), (5, 7), (1, 3))
    grid = init_device_mesh(world.device_type, (1, world.size) if world.size < 4 else (2, 2))
    for inside, out in sizes:
        for name, write in FUNCTIONS.items():
            manual_seed(9)
            plain = Maker(world).linear(inside, out)
            with platform.no_grad():
                write(plain.weight)
            for mesh, style in (
                (make_mesh(world), ColwiseParallel()),
                (make_mesh(world), RowwiseParallel()),
                (make_mesh(world), SequenceParallel()),
                (grid, Linear2DParallel()),
            ):
                layer = parallelize_module(Maker(world).linear(inside, out), mesh, style)
                manual_seed(9)
                with platform.no_grad():
                    write(layer.weight)
                assert isinstance(layer.weight, DTensor)
                assert_parity(
                    whole_parameters(platform, layer),
                    whole_parameters(platform, plain),
                    exact=True,
                    name=f"{name} of ({out}, {inside}) with {type(style).__name__}",
                )


@distributed(world_size=[2, 3], backends=("torch", "cuda"))
def test_torchs_own_initialisers_and_reset_parameters_draw_the_values_of_one_process(world: World) -> None:
    import torch

    dtype = getattr(torch, dtype_of(world))
    functions: list[Callable[[Any], Any]] = [
        lambda layer: torch.nn.init.kaiming_uniform_(layer.weight, a=5**0.5),
        lambda layer: torch.nn.init.xavier_normal_(layer.weight),
        lambda layer: torch.nn.init.normal_(layer.weight, std=0.02),
        lambda layer: torch.nn.init.orthogonal_(layer.weight),
        lambda layer: torch.nn.init.trunc_normal_(layer.weight, std=0.02),
        lambda layer: layer.reset_parameters(),
        lambda layer: layer.weight.data.normal_(0.0, 0.02),
    ]
    for i, write in enumerate(functions):
        for style in (ColwiseParallel(), RowwiseParallel()):
            plain, layer = (torch.nn.Linear(6, 10, dtype=dtype, device=world.device) for _ in range(2))
            parallelize_module(layer, make_mesh(world), style)
            manual_seed(9)
            with random.global_draws():
                write(plain)
            manual_seed(9)
            write(layer)
            with torch.no_grad():
                # orthogonal_ and trunc_normal_ compute more than they draw: last digits.
                assert_parity(
                    layer.weight.full_tensor(),
                    plain.weight.detach(),
                    rtol=1e-12,
                    atol=1e-13,
                    name=f"{i}, {style}",
                )


@distributed(world_size=[1, 2, 4])
def test_draws_after_a_parallel_model_go_on_as_in_one_process(world: World) -> None:
    """All ranks take as many numbers of the stream, also those whose pieces are empty."""
    with init_empty_weights():
        plain, sharded = (model(world, 3, 1) for _ in range(2))
    seen = []
    for net in (plain, sharded):
        if net is sharded:
            parallelize_module(net, make_mesh(world), PLANS["tensor"])
        manual_seed(5)
        init_parameters(net, device=world.device if net is plain else None)
        seen.append((random.get_state(), random.rand(3, device=world.device)))
    assert_parity(seen[1], seen[0], exact=True)


@distributed(world_size=2)
def test_ranks_that_were_built_differently_get_the_values_of_the_first(world: World) -> None:
    platform = world.platform
    for style in (ColwiseParallel(), RowwiseParallel(), SequenceParallel()):
        layer = Maker(world, seed=world.rank).linear(4, 6)
        parallelize_module(layer, make_mesh(world), style)
        assert_parity(
            whole_parameters(platform, layer),
            whole_parameters(platform, Maker(world, seed=0).linear(4, 6)),
            exact=True,
            name=type(style).__name__,
        )
