"""Layers whose weight is computed of other parameters are refused by styles, with what computes it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize

from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed
from hp_tp import ColwiseParallel, RowwiseParallel, parallelize_module


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@distributed(world_size=2)
def test_a_parametrized_weight_is_refused_until_the_parametrization_is_removed(
    world: World, style: type, bias: bool
) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    layer = parametrizations.weight_norm(torch.nn.Linear(4, 4, bias=bias, device=world.device))
    model = torch.nn.Sequential(layer)
    message = (
        rf"{style.__name__}: 'weight' of this ParametrizedLinear is what a parametrization computes \(weight_norm .*"
        r"remove_parametrizations\(module, 'weight'\)"
    )
    with pytest.raises(ValueError, match=message):
        parallelize_module(model, mesh, {"0": style()})
    parametrize.remove_parametrizations(layer, "weight")
    parallelize_module(model, mesh, {"0": style()})
    assert tuple(model[0].weight.to_local().shape) == ((2, 4) if style is ColwiseParallel else (4, 2))
