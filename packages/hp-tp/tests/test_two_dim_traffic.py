"""What linear layers over two mesh dims send: as much as is said, and never a whole row."""

from __future__ import annotations

import sys
from pathlib import Path

from hp_dtensor import (
    Shard,
    distribute_tensor,
    parallelize_module,
)
from hp_dtensor.chunk import chunk_size
from hp_platform.testing import World, assert_parity, count_collectives, distributed
from hp_tp import Linear2DParallel, describe

sys.path.insert(0, str(Path(__file__).parent))
from two_dim_layers import ROWS_BY_COLUMNS, gradients, leaf, mesh_of, numbers, stock_linear, tolerance, whole


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
