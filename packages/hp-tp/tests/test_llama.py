"""A Llama-like layer and a whole model under tensor and sequence parallel styles, against one process."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import Replicate, Shard
from hp_platform import collectives
from hp_platform.testing import World, assert_parity, count_collectives, distributed
from hp_tp import parallelize_module

sys.path.insert(0, str(Path(__file__).parent))
from tp_models import BATCH, Config, activation, block_of, make_mesh, model_of, token_ids, tolerance
from tp_plans import block_plan, model_plan
from tp_training import backward, check_steps, cross_entropy, local, mean_square, sgd_step

USUAL = Config()
"""12 query heads and 6 of keys and values: 1, 2 and 3 ranks; with replicated keys and values also 4."""
FEW = Config(heads=4, kv_heads=2, head_dim=4, hidden=10, layers=1)
ONE = Config(heads=12, kv_heads=1, hidden=13, layers=1, bias=False)
MODELS = {1: (USUAL,), 2: (USUAL, ONE), 3: (USUAL, ONE), 4: (USUAL, FEW, ONE)}
"""By the number of ranks; 50 words divide over 1 and 2 of them."""


def check_model(world: World, config: Config, **kwargs: Any) -> None:
    """Three steps of a model."""

    def loss_of(model: Any, step: int) -> Any:
        ids, targets = token_ids(world, config, step)
        return cross_entropy(world.platform, model(ids), targets)

    check_steps(world, lambda: model_of(world, config), model_plan(config, world.size, **kwargs), loss_of)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole sequence", "cut sequence"])
@distributed(world_size=(1, 2, 3, 4), timeout=300)
def test_three_steps_of_every_model_are_those_of_one_process(world: World, sequence: bool) -> None:
    """Every number of heads, with embedding and head tied and not, with the loss of whole logits and over cut classes."""
    for config, tied, logits in product(MODELS[world.size], (False, True), (None, Shard(-1))):
        check_model(world, replace(config, tied=tied), sequence=sequence, logits=logits)


@distributed(world_size=(2, 3))
def test_cut_sequences_may_travel_as_plain_pieces_alone(world: World) -> None:
    check_model(world, USUAL, sequence=True, is_plain=True, logits=Shard(-1))


@distributed(world_size=(2, 3, 4))
def test_a_sequence_that_does_not_divide_travels_in_dtensors(world: World) -> None:
    """7 places are 4 and 3, or 3, 3 and 1, or 2, 2, 2 and 1; 2 places leave ranks without any."""
    for length in (7, 2):
        config = replace(FEW if world.size == 4 else USUAL, length=length, layers=1, tied=length == 7)
        check_model(world, config, sequence=True, use_local=False)


@distributed(world_size=(1, 2, 3))
def test_a_layer_gives_output_and_gradients_of_one_process(world: World) -> None:
    platform, limits = world.platform, tolerance(world)
    reference = block_of(world, USUAL)
    layer = parallelize_module(block_of(world, USUAL), make_mesh(world), block_plan(USUAL, world.size))
    one, x = activation(world, USUAL), activation(world, USUAL)
    expected, found = reference(one), layer(x)
    assert_parity(found, expected, **limits, name="output")
    for y in (expected, found):
        backward(platform, mean_square(platform, y))
    assert_parity(platform.get_grad(x), platform.get_grad(one), **limits, name="gradient of the input")


@distributed(world_size=(2, 4), timeout=300)
def test_replicas_are_equal_bit_for_bit_after_fifty_steps(world: World) -> None:
    """Norms and biases, and keys and values that do not divide; with and without cut sequences and ties."""
    platform = world.platform
    for sequence, tied in ((False, True), (True, False)):
        config = replace(FEW, kv_heads=1, tied=tied, length=4)
        model = parallelize_module(
            model_of(world, config), make_mesh(world), model_plan(config, world.size, sequence=sequence)
        )
        for step in range(50):
            ids, targets = token_ids(world, config, step)
            backward(platform, cross_entropy(platform, model(ids), targets))
            sgd_step(platform, model)
        checked = 0
        for name, parameter in platform.named_parameters(model):
            if getattr(parameter, "placements", (Replicate(),)) != (Replicate(),):
                continue
            ours = platform.detach(local(parameter))
            everybody = collectives.all_gather(platform.reshape(ours, (1, -1)))
            bits = platform.to_bits(everybody)
            assert (bits == bits[:1]).all(), name
            checked = checked + 1
        assert checked >= 8


# ------------------------------------------------------------------------------------------------------------ communication
@distributed(world_size=(2, 3))
def test_a_layer_costs_two_all_reduces_forward_and_two_backward(world: World) -> None:
    platform = world.platform
    layer = parallelize_module(block_of(world, USUAL), make_mesh(world), block_plan(USUAL, world.size))
    x = activation(world, USUAL)
    nbytes = BATCH * USUAL.length * USUAL.width * platform.itemsize(x.dtype)
    for _ in range(2):
        with count_collectives() as forward:
            loss = mean_square(platform, layer(x * 1))
        forward.assert_counts(all_reduce=2)
        assert forward.nbytes("all_reduce") == 2 * nbytes
        with count_collectives() as back:
            backward(platform, loss)
        back.assert_counts(all_reduce=2)
        assert back.nbytes("all_reduce") == 2 * nbytes


@distributed(world_size=(2, 3))
def test_with_cut_sequences_a_layer_costs_two_pairs_of_gather_and_scatter_each_way(world: World) -> None:
    platform = world.platform
    config = replace(USUAL, bias=False)
    layer = parallelize_module(
        block_of(world, config), make_mesh(world), block_plan(config, world.size, sequence=True)
    )
    whole = activation(world, config)
    nbytes = BATCH * config.length * config.width * platform.itemsize(whole.dtype)
    own = platform.split(platform.detach(whole), [config.length // world.size] * world.size, 1)[world.rank]
    x = platform.set_requires_grad_(platform.clone(own), True)
    for _ in range(2):
        with count_collectives() as forward:
            loss = mean_square(platform, layer(x * 1))
        forward.assert_counts(all_gather=2, reduce_scatter=2)
        with count_collectives() as back:
            backward(platform, loss)
        # And the two norms' weights, of which every rank has a summand of the gradient.
        back.assert_counts(all_gather=2, reduce_scatter=2, all_reduce=2)
        for counted in (forward, back):
            assert counted.nbytes("all_gather") == counted.nbytes("reduce_scatter") == 2 * nbytes
        assert back.nbytes("all_reduce") == 2 * config.width * platform.itemsize(x.dtype)
