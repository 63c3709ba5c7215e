"""Linear layers over two mesh dims: values, gradients of every order and communication against one process."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import numpy as np
import pytest

from hp_dtensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_empty_weights,
    init_parameters,
    manual_seed,
    parallelize_module,
)
from hp_dtensor.chunk import chunk_size
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed
from hp_tp import Linear2DParallel, describe

ROWS_BY_COLUMNS = {
    1: [(1, 1)],
    2: [(1, 2), (2, 1)],
    3: [(1, 3), (3, 1)],
    4: [(2, 2), (1, 4), (4, 1)],
}
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


def dtype_of(world: World) -> str:
    return "float64" if world.platform.supports("float64_compute", world.device) else "float32"


def tolerance(world: World) -> dict[str, float]:
    """Sums of at most 30 products of numbers below 1, in another order than in one process."""
    return {"rtol": 0.0, "atol": 1e-13 if dtype_of(world) == "float64" else 1e-5}


def stock_linear(world: World, inside: int, out: int, bias: bool = True) -> Any:
    """The framework's own layer, with values that depend on its sizes only."""
    platform = world.platform
    name = {"torch": "torch", "mindspore": "mindspore.mint"}[platform.platform_type.value]
    layer = importlib.import_module(name).nn.Linear(inside, out, bias=bias)
    random = np.random.default_rng(inside * 100 + out)
    for attribute, shape in (("weight", (out, inside)), ("bias", (out,))):
        if attribute == "weight" or bias:
            values = platform.tensor(random.uniform(-0.5, 0.5, shape), dtype_of(world), world.device)
            platform.set_parameter(layer, attribute, platform.parameter(values))
    return layer


def numbers(world: World, *shape: int, seed: int = 0) -> Any:
    values = np.random.default_rng(seed).uniform(-1.0, 1.0, shape)
    return world.platform.tensor(values, dtype_of(world), world.device)


def leaf(world: World, x: Any) -> Any:
    return world.platform.set_requires_grad_(world.platform.clone(world.platform.detach(x)), True)


def mesh_of(world: World, shape: tuple[int, int]) -> Any:
    return init_device_mesh(world.device_type, shape, mesh_dim_names=("tp_r", "tp_c"))


def whole(x: Any, mesh: Any, placements: Any, shape: tuple[int, ...]) -> Any:
    return DTensor.from_local(x, mesh, placements, shape=shape).full_tensor()


def gradients(world: World, layer: Any) -> dict[str, Any]:
    platform = world.platform
    found = {
        name: p.grad if hasattr(p, "_spec") else platform.get_grad(p)
        for name, p in platform.named_parameters(layer)
    }
    return {name: g.full_tensor() if hasattr(g, "_spec") else g for name, g in found.items()}


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
def test_layers_follow_each_other_without_communication_in_between(world: World) -> None:
    platform, width, hidden, dims = world.platform, 8, 20, (4, 3)
    plain = [stock_linear(world, width, hidden), stock_linear(world, hidden, width)]
    x, g = leaf(world, numbers(world, *dims, width)), numbers(world, *dims, width, seed=1)
    y = plain[1](platform.silu(plain[0](x)))
    platform.backward([y], [g])
    for mesh_shape in ROWS_BY_COLUMNS[world.size]:
        mesh, cut = mesh_of(world, mesh_shape), (Shard(0), Shard(-1))
        up, down = stock_linear(world, width, hidden), stock_linear(world, hidden, width)
        for layer in (up, down):
            parallelize_module(layer, mesh, Linear2DParallel())
        own = leaf(world, distribute_tensor(platform.detach(x), mesh, cut).to_local())
        own_g = distribute_tensor(g, mesh, cut).to_local()
        with count_collectives() as forward:
            result = down(platform.silu(up(own)))
        with count_collectives() as backward:
            platform.backward([result], [own_g])
        assert_parity(
            {
                "y": whole(platform.detach(result), mesh, cut, tuple(y.shape)),
                "x": whole(platform.get_grad(own), mesh, cut, tuple(x.shape)),
                "up": gradients(world, up),
                "down": gradients(world, down),
            },
            {
                "y": platform.detach(y),
                "x": platform.get_grad(x),
                "up": gradients(world, plain[0]),
                "down": gradients(world, plain[1]),
            },
            **tolerance(world),
        )
        # What the docstring states: P = 8 moves in both layers, Q = 20 stays; m rows and q columns are this rank's.
        (r, c), panels = mesh_shape, max(mesh_shape)
        at_r, at_c = mesh.get_coordinate()
        m, q = chunk_size(dims[0], r, at_r) * dims[1], chunk_size(hidden, c, at_c)
        along_c, along_r = (c > 1) * m * width, (r > 1) * width * q
        itemsize = platform.itemsize(own.dtype)
        assert forward.nbytes() == 2 * (along_c + along_r) * itemsize
        biases = (r > 1) * (q + chunk_size(width, c, at_c))
        assert backward.nbytes("all_reduce") == biases * itemsize
        assert backward.nbytes() == (4 * (along_c + along_r) + biases) * itemsize
        # up gathers its input, down scatters its output; both gather their weights.
        declared = [describe(layer).traffic[""].declared for layer in (up, down)]
        for launched, sides in ((forward, "forward"), (backward, "backward")):
            told = [each for layer in declared for each in getattr(layer, sides)]
            nbytes = sum((each.nbytes or 0) + (each.nbytes_per_row or 0) * m for each in told)
            assert nbytes == launched.nbytes(), (sides, told)
        forward.assert_counts(all_gather=panels * ((c > 1) + 2 * (r > 1)), reduce_scatter=panels * (c > 1))
        backward.assert_counts(
            all_gather=panels * (3 * (c > 1) + 2 * (r > 1)),
            reduce_scatter=panels * ((c > 1) + 2 * (r > 1)),
            all_reduce=2 * (r > 1),
        )


@distributed(world_size=[2, 4])
def test_no_rank_ever_holds_a_whole_row(world: World) -> None:
    """What arrives at a time is a panel, and panels are no longer than what a rank holds itself."""
    width, hidden, rows = 16, 32, 8
    for mesh_shape in ROWS_BY_COLUMNS[world.size]:
        mesh, (r, c) = mesh_of(world, mesh_shape), mesh_shape
        layer = stock_linear(world, width, hidden)
        parallelize_module(layer, mesh, Linear2DParallel())
        x = distribute_tensor(numbers(world, rows, width), mesh, (Shard(0), Shard(-1))).to_local()
        with count_collectives() as counted:
            layer(x)
        itemsize = world.platform.itemsize(x.dtype)
        limits = {
            "tp_c": rows // r * width // max(r, c) * itemsize,
            "tp_r": hidden // c * width // max(r, c) * itemsize,
        }
        for launch in counted.record.launches:
            dim = "tp_c" if launch.group is mesh.get_group("tp_c") else "tp_r"
            assert launch.nbytes <= limits[dim], (launch, limits)


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


@distributed(world_size=[2, 4])
def test_initialised_from_meta_it_has_the_values_of_one_process(world: World) -> None:
    platform = world.platform
    name = {"torch": "torch", "mindspore": "mindspore.mint"}[platform.platform_type.value]
    nn = importlib.import_module(name).nn

    def build() -> Any:
        with init_empty_weights():
            return nn.Linear(6, 9)

    manual_seed(3)
    plain = init_parameters(build(), device=world.device)
    expected = {n: platform.detach(p) for n, p in platform.named_parameters(plain)}
    for mesh_shape in ROWS_BY_COLUMNS[world.size]:
        layer = build()
        parallelize_module(layer, mesh_of(world, mesh_shape), Linear2DParallel())
        manual_seed(3)
        init_parameters(layer)
        found = {n: p.detach().full_tensor() for n, p in platform.named_parameters(layer)}
        assert_parity(found, expected, exact=True, name=str(mesh_shape))


@distributed(world_size=2)
def test_values_are_those_of_the_rank_that_counts_and_copies_work(world: World) -> None:
    platform, mesh = world.platform, mesh_of(world, (2, 1))
    plain, layer = stock_linear(world, 4, 6), stock_linear(world, 4, 6)
    if world.rank == 1:
        with platform.no_grad():
            platform.fill_(layer.weight, 7.0)
    parallelize_module(layer, mesh, Linear2DParallel())  # src_data_rank=0
    assert_parity(layer.weight.detach().full_tensor(), platform.detach(plain.weight), exact=True)
    copied = copy.deepcopy(layer)
    x = distribute_tensor(numbers(world, 2, 4), mesh, (Shard(0), Shard(1))).to_local()
    assert_parity(copied(x), layer(x), exact=True)
    with platform.no_grad():
        platform.fill_(layer.bias.to_local(), 1.0)
    assert_parity(copied.weight.detach().full_tensor(), platform.detach(plain.weight), exact=True)
    assert float(np.abs(platform.to_numpy(platform.detach(copied(x) - layer(x)))).max()) > 0.1


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
