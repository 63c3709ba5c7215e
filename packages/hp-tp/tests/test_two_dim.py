"""Linear layers over two mesh dims: values and gradients of every order against one process."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import (
    Replicate,
    Shard,
    distribute_tensor,
    parallelize_module,
)
from hp_platform import DeviceMesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed
from hp_tp import Linear2DParallel

sys.path.insert(0, str(Path(__file__).parent))
from two_dim_layers import ROWS_BY_COLUMNS, gradients, leaf, mesh_of, numbers, stock_linear, tolerance, whole

CASES: list[tuple[tuple[int, ...], int, int, int, bool, int | None]] = [
    # input's dims but the last, in, out, row_dim, bias, panels
    ((4, 3), 8, 12, 0, True, None),  # even, the input moves
    ((4, 3), 12, 8, 1, True, None),  # even on 2 and 4, the output moves
    ((5,), 7, 11, 0, True, 3),  # primes
    ((3, 5), 13, 5, -2, False, None),
    ((1, 2), 1, 3, 0, True, None),  # fewer features and samples than ranks
    ((2, 1), 5, 1, 0, True, 1),
    ((1,), 1, 1, 0, False, 7),
    ((3, 2, 4), 6, 6, 1, True, 2),
]


def check(
    world: World,
    mesh: Any,
    dims: tuple[int, ...],
    inside: int,
    out: int,
    *,
    row_dim: int,
    bias: bool,
    num_panels: int | None,
) -> None:
    """Result and gradients of one layer, for an input ``(*dims, inside)``."""
    platform = world.platform
    plain = stock_linear(world, inside, out, bias)
    x, g = leaf(world, numbers(world, *dims, inside)), numbers(world, *dims, out, seed=1)
    y = plain(x)
    platform.backward([y], [g])

    layer = stock_linear(world, inside, out, bias)
    style = Linear2DParallel(row_dim=row_dim, num_panels=num_panels)
    assert parallelize_module(layer, mesh, style) is layer
    cut = (Shard(row_dim), Shard(-1))
    own = leaf(world, distribute_tensor(platform.detach(x), mesh, cut).to_local())
    result = layer(own)
    platform.backward([result], [distribute_tensor(g, mesh, cut).to_local()])
    assert_parity(
        {
            "y": whole(platform.detach(result), mesh, cut, tuple(y.shape)),
            "x": whole(platform.get_grad(own), mesh, cut, tuple(x.shape)),
            **gradients(world, layer),
        },
        {"y": platform.detach(y), "x": platform.get_grad(x), **gradients(world, plain)},
        **tolerance(world),
        name=f"{mesh}, {dims} x {inside} -> {out}",
    )


@distributed(world_size=[1, 2, 3, 4])
def test_values_and_all_gradients_equal_those_of_one_process(world: World) -> None:
    for mesh_shape in ROWS_BY_COLUMNS[world.size]:
        mesh = mesh_of(world, mesh_shape)
        for dims, inside, out, row_dim, bias, num_panels in CASES:
            check(world, mesh, dims, inside, out, row_dim=row_dim, bias=bias, num_panels=num_panels)


@distributed(world_size=[2, 4])
def test_ranks_may_lie_on_the_mesh_in_any_order(world: World) -> None:
    ranks = {2: [[[1, 0]], [[1], [0]]], 4: [[[3, 1], [2, 0]], [[2, 0, 3, 1]]]}
    for order in ranks[world.size]:
        mesh = DeviceMesh(world.device_type, order, mesh_dim_names=("tp_r", "tp_c"))
        for dims, inside, out, row_dim, bias, num_panels in CASES[:3]:
            check(world, mesh, dims, inside, out, row_dim=row_dim, bias=bias, num_panels=num_panels)


@distributed(world_size=[2, 4])
def test_inputs_and_outputs_may_lie_otherwise_and_be_sharded_tensors(world: World) -> None:
    platform, (rows, inside, out) = world.platform, (5, 6, 7)
    plain = stock_linear(world, inside, out)
    x, g = leaf(world, numbers(world, rows, inside)), numbers(world, rows, out, seed=1)
    y = plain(x)
    platform.backward([y], [g])
    expected = {"y": platform.detach(y), "x": platform.get_grad(x), **gradients(world, plain)}
    everywhere = (Replicate(), Replicate())
    for mesh_shape in ROWS_BY_COLUMNS[world.size]:
        mesh = mesh_of(world, mesh_shape)

        layer = stock_linear(world, inside, out)
        style = Linear2DParallel(input_layouts=everywhere, output_layouts=everywhere)
        parallelize_module(layer, mesh, style)
        own = leaf(world, x)
        result = layer(own)
        platform.backward([result], [g])
        found = {"y": platform.detach(result), "x": platform.get_grad(own), **gradients(world, layer)}
        assert_parity(found, expected, **tolerance(world), name=f"plain on {mesh_shape}")

        layer = stock_linear(world, inside, out)
        parallelize_module(layer, mesh, Linear2DParallel(use_local_output=False))
        given = distribute_tensor(platform.detach(x), mesh, (Replicate(), Shard(0))).requires_grad_(True)
        result = layer(given)
        assert result.placements == (Shard(0), Shard(1)) and tuple(result.shape) == (rows, out)
        result.backward(g)
        found = {"y": result.detach().full_tensor(), "x": given.grad.full_tensor(), **gradients(world, layer)}
        assert_parity(found, expected, **tolerance(world), name=f"DTensor on {mesh_shape}")


@pytest.mark.parametrize(("inside", "out"), [(5, 8), (8, 5)])
@distributed(world_size=[2, 4], backends=("torch", "cuda"))
def test_second_derivatives_equal_those_of_one_process(world: World, inside: int, out: int) -> None:
    platform = world.platform

    def second(layer: Any, x: Any, g: Any) -> list[Any]:
        """The gradients of a sum of squares of the gradients of a sum of cubes."""
        y = layer(x)
        parameters = [p.to_local() if hasattr(p, "_spec") else p for _, p in platform.named_parameters(layer)]
        firsts = platform.grad([y], [x, *parameters], [y * y * g], create_graph=True)
        return [platform.grad([f], [x], [f], retain_graph=True)[0] for f in firsts[:2]]

    x, g = numbers(world, 4, inside), numbers(world, 4, out, seed=1)
    expected = second(stock_linear(world, inside, out), leaf(world, x), g)
    for mesh_shape in ROWS_BY_COLUMNS[world.size]:
        mesh, cut = mesh_of(world, mesh_shape), (Shard(0), Shard(-1))
        layer = stock_linear(world, inside, out)
        parallelize_module(layer, mesh, Linear2DParallel())
        own_x, own_g = (distribute_tensor(t, mesh, cut).to_local() for t in (x, g))
        found = second(layer, leaf(world, own_x), own_g)
        for order, (one, other) in enumerate(zip(found, expected, strict=True)):
            # Products of up to five factors below 4: measured below 1e-11.
            assert_parity(whole(one, mesh, cut, (4, inside)), other, rtol=1e-11, atol=1e-11, name=str(order))


@distributed(world_size=2, backends=("torch", "cuda"))
def test_half_precision_is_rounded_once_and_autocast_casts_before_anything_travels(world: World) -> None:
    import torch

    mesh, cut = mesh_of(world, (1, 2)), (Shard(0), Shard(1))
    x = numbers(world, 8, 64).float()
    for inside, out in ((64, 96), (64, 32)):
        plain = torch.nn.Linear(inside, out, dtype=torch.bfloat16, device=world.device)
        for parameter in plain.parameters():
            torch.distributed.broadcast(parameter.detach(), 0)
        exact = (x.bfloat16().float() @ plain.weight.detach().float().T).bfloat16() + plain.bias.detach()
        own = distribute_tensor(x, mesh, cut).to_local()
        moved = []
        for autocast in (False, True):
            layer = copy.deepcopy(plain).float() if autocast else copy.deepcopy(plain)
            parallelize_module(layer, mesh, Linear2DParallel(num_panels=16))
            given = (own if autocast else own.bfloat16()).requires_grad_()
            with (
                torch.autocast(x.device.type, torch.bfloat16, enabled=autocast),
                count_collectives() as counted,
            ):
                y = layer(given)
            assert y.dtype == torch.bfloat16
            # One rounding to 8 bits, and one more where partial sums of two ranks travel as such.
            torch.testing.assert_close(
                whole(y.detach(), mesh, cut, (8, out)),
                exact,
                rtol=2**-7,
                atol=2**-6 if out < inside else 1e-4,
            )
            y.sum().backward()
            assert given.grad.dtype == given.dtype and layer.weight.grad.dtype == layer.weight.dtype
            moved.append(counted.nbytes())
            torch.testing.assert_close(
                layer.bias.grad.full_tensor().float(), torch.full((out,), 8.0, device=world.device)
            )
        assert moved[0] == moved[1]
