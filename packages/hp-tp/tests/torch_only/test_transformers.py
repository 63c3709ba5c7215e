"""Models of the transformers library under ``plan_for``: training and generation are those of one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_dtensor import Replicate
from hp_platform import collectives
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from transformers_models import build, check_own_loss, check_training, ids_of, parallel

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


@distributed(world_size=3, backends=TORCH, timeout=180)
def test_replicas_are_equal_to_the_bit_after_fifty_steps(world: World) -> None:
    """Routers, norms and biases, of which every rank has a copy, and computes or receives its gradient."""
    for sequence in (True, False):
        for kind in ("mixtral", "llama"):
            model = parallel(world, build(kind, num_hidden_layers=1), sequence_parallel=sequence)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            for step in range(50):
                ids = ids_of(world, 5, step)
                model(ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            copies = {n: p.to_local() for n, p in model.named_parameters() if p.placements == (Replicate(),)}
            assert len(copies) >= 4
            for name, copy in copies.items():
                of_ranks = collectives.all_gather(copy.detach()[None])
                assert torch.equal(of_ranks, copy[None].expand_as(of_ranks)), name
