"""A whole model whose logits stay cut, or are never made: three steps are those of one process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import DTensor, Shard
from hp_platform.testing import World, count_collectives, distributed
from hp_tp import linear_cross_entropy, loss_parallel, parallelize_module, vocab_parallel_cross_entropy

sys.path.insert(0, str(Path(__file__).parent))
from tp_models import Config, make_mesh, model_of, token_ids
from tp_plans import model_plan
from tp_training import backward, check_steps

USUAL = Config(layers=1, length=12)
"""50 classes: on 4 ranks 13, 13, 13 and 11."""
FEW = Config(heads=4, kv_heads=2, head_dim=4, hidden=10, layers=1, length=12)


def cut_loss(world: World, model: Any, config: Config, step: int) -> Any:
    """Of the logits as they come: in one process whole, else a DTensor cut along the classes."""
    ids, targets = token_ids(world, config, step)
    logits = model(ids).reshape((-1, config.vocabulary))
    target = world.platform.reshape(targets, (-1,))
    if not isinstance(logits, DTensor):
        return world.platform.cross_entropy(logits, target)
    assert logits.placements == (Shard(1),)
    if world.backend == "mindspore":
        return vocab_parallel_cross_entropy(logits, target)
    from torch.nn.functional import cross_entropy

    with loss_parallel():
        return cross_entropy(logits, target)


def fused_loss(world: World, model: Any, config: Config, step: int) -> Any:
    """Of what goes into the head, and the head's weight."""
    ids, targets = token_ids(world, config, step)
    x = model.embed(ids)
    for layer in model.layers:
        x = layer(x)
    return linear_cross_entropy(model.norm(x), model.head.weight, targets, chunk_size=9)


@pytest.mark.parametrize("tied", [False, True])
@distributed((1, 2, 3, 4), timeout=120)
def test_three_steps_of_a_model_are_those_of_one_process(world: World, tied: bool) -> None:
    config = replace(FEW if world.size == 4 else USUAL, tied=tied)
    for loss in (cut_loss, fused_loss):
        for sequence in (False, True):
            plan = model_plan(config, world.size, sequence=sequence, logits=Shard(-1))
            check_steps(
                world,
                lambda: model_of(world, config),
                plan,
                lambda model, step, loss=loss: loss(world, model, config, step),
                steps=3 if sequence else 1,
            )


@distributed(2)
def test_a_cut_or_fused_loss_sends_no_logits(world: World) -> None:
    platform = world.platform
    sent = {}
    for loss in (cut_loss, fused_loss, None):
        logits = None if loss is None else Shard(-1)
        plan = model_plan(USUAL, world.size, sequence=True, logits=logits)
        model = parallelize_module(model_of(world, USUAL), make_mesh(world), plan)
        with count_collectives() as counted:
            backward(platform, (loss or cut_loss)(world, model, USUAL, 0))
        sent[loss] = counted.nbytes()
    ids, _ = token_ids(world, USUAL)
    num_logits = ids.shape[0] * ids.shape[1] * USUAL.vocabulary
    # Whole logits are gathered in forward; three numbers per token go instead.
    assert sent[cut_loss] < sent[None] - num_logits
    assert sent[fused_loss] <= sent[cut_loss]
