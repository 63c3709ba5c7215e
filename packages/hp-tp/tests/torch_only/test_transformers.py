"""Models of the transformers library under ``plan_for``: training and generation are those of one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from transformers_models import check_own_loss, check_training, ids_of

SWITCHES = [
    {"sequence_parallel": sequence, "loss_parallel": loss}
    for sequence in (True, False)
    for loss in (True, False)
]
TORCH = ("torch",)


def generated(model: Any, ids: Any, **options: Any) -> list[list[int]]:
    """Six new words."""
    return model.generate(ids, max_new_tokens=6, **{"do_sample": False, **options}).tolist()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral"])
@distributed(world_size=(1, 2, 3), backends=TORCH, timeout=180)
def test_three_steps_and_what_is_generated_are_those_of_one_process(world: World, kind: str) -> None:
    """With 7 places the sequence does not divide over 2 or 3 ranks; with 1 place most ranks have none of it."""
    for number, options in enumerate(SWITCHES):
        changes = {"tie_word_embeddings": number % 2 == 0}
        length, steps = (7, 3) if number in (0, 3) else (6, 1)
        reference, model = check_training(world, kind, length, options, steps, **changes)
        check_own_loss(world, reference, model, length)
        ids = ids_of(world, length, 9)
        assert generated(model.eval(), ids) == generated(reference.eval(), ids)
        if number == 0:
            assert generated(model, ids[:, :1]) == generated(reference, ids[:, :1])


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral"])
@distributed(world_size=4, backends=TORCH, timeout=180)
def test_keys_and_values_that_do_not_divide_are_replicated(world: World, kind: str) -> None:
    """Several ranks compute a head of keys, and the library's norm of it would round each one's gradient to float32."""
    for number, kv_heads in enumerate((6, 4, 2, 1)):
        options = {**SWITCHES[number], "replicate_kv": True}
        changes = {"num_key_value_heads": kv_heads, "tie_word_embeddings": number < 2, "exact_norms": True}
        reference, model = check_training(world, kind, 7, options, steps=2, **changes)
        ids = ids_of(world, 7, 9)
        assert generated(model.eval(), ids) == generated(reference.eval(), ids)
