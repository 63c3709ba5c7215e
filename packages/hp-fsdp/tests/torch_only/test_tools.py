"""Other tools of torch on sharded models: parametrizations, autocast, anomaly detection, vectors of parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector, parametrizations, vector_to_parameters

from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from torch_models import CLOSE, TORCH, batch, gradients, loss_of, make, make_mesh, parameters, shard

PARAMETRIZATIONS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
}


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
@distributed(world_size=(2, 3), backends=TORCH)
def test_weights_that_are_computed_from_sharded_parameters(world: World, name: str) -> None:
    models = (make(world), make(world))
    for model in models:
        for block in model.blocks:
            torch.manual_seed(5)  # spectral norm begins with random vectors, which are buffers
            PARAMETRIZATIONS[name](block.inner)
    shard(models[1], make_mesh(world))
    for step in range(3):
        for model, samples in zip(models, batch(world, step), strict=True):
            model.zero_grad()
            loss_of(model, samples).backward()
            assert any("parametrizations" in n for n, g in gradients(model).items() if g is not None)
        assert_parity(gradients(models[1]), gradients(models[0]), **CLOSE)
        for model in models:
            torch.optim.SGD(model.parameters(), 0.1).step()
    assert_parity(parameters(models[1]), parameters(models[0]), **CLOSE)


@distributed(world_size=2, backends=TORCH)
def test_autocast_computes_as_in_one_process(world: World) -> None:
    reference, model = make(world).float(), shard(make(world).float(), make_mesh(world))
    everything, mine = batch(world, 0)
    with torch.autocast(world.device_type, torch.bfloat16):
        loss_of(model, mine).backward()
        for part in everything.chunk(world.size):
            (loss_of(reference, part) / world.size).backward()
    # Sums of gradients in float32; a share is halved before its backward, which rounds nothing in bfloat16.
    assert_parity(gradients(model), gradients(reference), rtol=0.0, atol=1e-6)
    assert model.embed.weight.grad.dtype is torch.float32


# Anomaly detection says that it is on.
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@distributed(world_size=2, backends=TORCH)
def test_anomaly_detection_finds_nothing_where_nothing_is(world: World) -> None:
    reference, model = make(world), shard(make(world), make_mesh(world))
    with torch.autograd.detect_anomaly(check_nan=True):
        for each, samples in zip((reference, model), batch(world, 0), strict=True):
            loss_of(each, samples).backward()
    assert_parity(gradients(model), gradients(reference), **CLOSE)


@distributed(world_size=(2, 3), backends=TORCH)
def test_all_parameters_go_into_one_vector_and_whole_values_in_their_place_are_refused(world: World) -> None:
    reference, model = make(world), shard(make(world), make_mesh(world))
    wanted = parameters_to_vector(reference.parameters())
    found = parameters_to_vector(model.parameters())
    assert_parity(found.detach(), wanted.detach(), exact=True)
    vector_to_parameters(
        found.detach() * 2, model.parameters()
    )  # exchanges the data of each for whole values
    with pytest.raises(
        RuntimeError, match=r"the shard of parameter '.*' was changed .* set_model_state_dict"
    ):
        model(batch(world, 0)[1])
