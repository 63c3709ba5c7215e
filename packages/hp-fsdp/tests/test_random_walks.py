"""Random walks of training, evaluation, dropped losses and failures equal one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_fsdp import hsdp_sync_stream, parts
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import tolerance
from turns import NUM_UNITS, Pair, fail_in_backward, fail_in_forward, loss_of_rank

# ------------------------------------------------------------------------------------------------ anything after anything
OPTIONS: dict[str, dict[str, Any]] = {
    "freed": {},
    "kept": {"reshard_after_forward": False},
    "unfused": {"comm_fusion": False},
    "apart": {"comm_fusion_zero_copy": False},
    "parts": {},  # layers of the root are units of their own
}


TOLD = ["as it is", "keeps after backward", "not the last backward", "root freed"]


@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize("options", list(OPTIONS))
@distributed(world_size=(2, 4), backends="torch")
def test_a_random_walk_of_training_evaluation_and_dropped_losses_equals_one_process(
    world: World, options: str, told: str
) -> None:
    check_walk(world, options, told)


@pytest.mark.parametrize(("options", "told"), list(zip(OPTIONS, TOLD, strict=False)))
@distributed(world_size=2, backends=("cuda", "npu", "mindspore"))
def test_so_does_a_random_walk_elsewhere(world: World, options: str, told: str) -> None:
    check_walk(world, options, told)


def check_walk(world: World, options: str, told: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if options == "parts":
            patch.setattr(parts, "MIN_NBYTES", 1)
        walk(Pair(world, **OPTIONS[options]), told)


def walk(pair: Pair, told: str, seed: int = 5) -> None:
    platform = pair.platform
    if told == "keeps after backward":
        pair.model.set_reshard_after_backward(False)
    elif told == "not the last backward":
        pair.model.set_is_last_backward(False)
    elif told == "root freed":
        pair.model.set_reshard_after_forward(True)
    random = np.random.default_rng(seed)  # the same walk on all ranks

    def order() -> list[int]:
        usual = list(range(NUM_UNITS))
        return usual if random.random() < 0.6 else list(random.permutation(usual)[: random.integers(0, 5)])

    kinds = [
        "train",
        "accumulate",
        "evaluate",
        "drop",
        "two",
        "unshard",
        "clear",
        "step",
        "fail",
        "fail late",
    ]
    for batch in range(30):
        kind = kinds[random.integers(len(kinds))]
        if kind in ("train", "accumulate"):
            pair.model.set_requires_gradient_sync(kind == "train")
            pair.backward(batch, order())
            if kind == "accumulate":  # must be reduced before anybody looks
                pair.model.set_requires_gradient_sync(True)
                pair.backward(batch + 100, order())
        elif kind == "evaluate":
            with platform.no_grad():
                assert_parity(pair.loss(batch), loss_of_rank(pair, batch), **tolerance(pair.world))
        elif kind == "drop":
            pair.loss(batch, order())
        elif kind == "two":
            losses = [pair.loss(batch, order()), pair.loss(batch + 200)]
            platform.backward([losses[1]])
            platform.backward([pair.reference_loss(batch + 200)])
            del losses
        elif kind == "unshard":
            pair.model.blocks[1].unshard()
        elif kind == "clear":
            pair.drop_gradients()
        elif kind == "fail":
            fail_in_forward(pair, int(random.integers(NUM_UNITS)), batch)
            with platform.no_grad():  # the next forward tidies up, and gradients are as they were
                pair.loss(batch)
        elif kind == "fail late":
            fail_in_backward(pair, int(random.integers(NUM_UNITS)), batch)
            pair.drop_gradients()  # some may have come
        else:
            hsdp_sync_stream()
            pair.check()
            pair.step()
    hsdp_sync_stream()
    pair.check()
    pair.model.set_reshard_after_backward(True)
    pair.drop_gradients()
    pair.backward(1000)
    hsdp_sync_stream()
    pair.check()
    pair.check_freed()
