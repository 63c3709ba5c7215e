"""Attention dropout of models of the transformers library under ``plan_for`` is that of one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hp_dtensor import manual_seed, random
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from transformers_models import CLOSE, build, gradients, ids_of, parallel, square_of, whole


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@distributed(world_size=(1, 2, 3), backends=("torch",), timeout=180)
def test_two_steps_with_dropped_probabilities_are_those_of_one_process(world: World, attention: str) -> None:
    for sequence in (True, False):
        changes = {"attention_dropout": 0.3, "attn_implementation": attention}
        reference, model = (build("llama", **changes).to(world.device).train() for _ in range(2))
        parallel(world, model, sequence_parallel=sequence, loss_parallel=True)
        kept = reference.eval()(ids_of(world, 6)).logits.detach()
        reference.train()
        states = []
        for step in range(2):
            ids = ids_of(world, 6, step)
            manual_seed(step)
            with random.global_draws():
                expected = reference(ids).logits
            states.append(random.get_state())
            manual_seed(step)
            found = model(ids).logits
            states.append(random.get_state())
            name = f"sequence parallel {sequence}, step {step}"
            assert_parity(whole(found), expected.detach(), **CLOSE, name=f"logits, {name}")
            for logits in (expected, found):
                square_of(logits).backward()
            assert_parity(gradients(model), gradients(reference), **CLOSE, name=f"gradients, {name}")
            if step == 0:
                assert (kept - expected.detach()).abs().max() > 0.01
        assert states[0] == states[1] and states[2] == states[3]
