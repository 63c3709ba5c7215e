"""The parameters of linear layers over two mesh dims: from meta, of the rank that counts, copied."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hp_dtensor import (
    Shard,
    distribute_tensor,
    init_empty_weights,
    init_parameters,
    manual_seed,
    parallelize_module,
)
from hp_platform.testing import World, assert_parity, distributed
from hp_tp import Linear2DParallel

sys.path.insert(0, str(Path(__file__).parent))
from two_dim_layers import ROWS_BY_COLUMNS, mesh_of, numbers, stock_linear


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
