"""The parameters of a layer in a style: whose values they have, frozen ones, copies."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

from hp_platform.testing import World, distributed
from hp_tp import ColwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parent))
from style_layers import input_of
from tp_models import Maker, make_mesh
from tp_training import local


@distributed(world_size=2)
def test_values_are_those_of_the_first_rank_or_of_every_rank(world: World) -> None:
    platform, mesh = world.platform, make_mesh(world)
    for source, expected in ((0, 0.0), (1, 1.0), (None, float(world.rank))):
        layer = Maker(world).linear(4, 6)
        platform.copy_(
            layer.weight, platform.full((6, 4), float(world.rank), layer.weight.dtype, world.device)
        )
        parallelize_module(layer, mesh, ColwiseParallel(), src_data_rank=source)
        assert (platform.to_numpy(local(layer.weight)) == expected).all()


@distributed(world_size=2)
def test_frozen_parameters_stay_frozen(world: World) -> None:
    platform, mesh = world.platform, make_mesh(world)
    layer = Maker(world).linear(4, 6)
    platform.set_requires_grad_(layer.weight, False)
    parallelize_module(layer, mesh, ColwiseParallel(parts=[4, 2]))
    asked = {name: platform.requires_grad(p) for name, p in platform.named_parameters(layer)}
    assert asked == {"weight_0": False, "weight_1": False, "bias_0": True, "bias_1": True}


@distributed(world_size=2, backends=("torch", "cuda", "npu"))
def test_a_module_in_a_style_can_be_copied(world: World) -> None:
    platform, mesh = world.platform, make_mesh(world)
    layer = parallelize_module(Maker(world).linear(6, 6), mesh, ColwiseParallel())
    twin = copy.deepcopy(layer)
    assert type(twin) is type(layer)
    assert type(twin).__name__ == "Linear"
    x = platform.detach(input_of(world, 6))
    assert (platform.to_numpy(twin(x)) == platform.to_numpy(layer(x))).all()
    platform.copy_(local(twin.weight), platform.zeros_like(platform.detach(local(twin.weight))))
    assert abs(platform.to_numpy(layer(x)) - platform.to_numpy(twin(x))).max() > 0.1
