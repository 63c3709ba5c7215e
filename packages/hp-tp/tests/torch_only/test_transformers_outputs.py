"""What else models of transformers take and give under ``plan_for``: every way to generate, attentions, hidden states, embeddings."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_dtensor import DTensor
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from transformers_models import (
    CLOSE,
    ROUNDED,
    SIZES,
    build,
    gradients,
    ids_of,
    parallel,
    square_of,
    whole,
)

TORCH = ("torch",)
GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {},
    "without a cache": {"use_cache": False},
    "a static cache": {"cache_implementation": "static"},
    "sampling": {"do_sample": True, "top_k": 10, "top_p": 0.9, "temperature": 0.8},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}


def both(world: World, kind: str = "llama", options: dict[str, Any] | None = None, **changes: Any) -> Any:
    reference, model = (build(kind, **changes).to(world.device) for _ in range(2))
    return reference, parallel(world, model, **(options or {}))


@pytest.mark.parametrize("sequence", [True, False])
@distributed(world_size=3, backends=TORCH, timeout=180)
def test_every_way_to_generate_gives_the_words_of_one_process(world: World, sequence: bool) -> None:
    """Attention on DTensors, too, which a static cache cannot hold."""
    for local in (None, False):
        options = {"sequence_parallel": sequence, "local_attention": local}
        models = [model.eval() for model in both(world, options=options)]
        ids = ids_of(world, 7)
        masked = torch.ones_like(ids)
        masked[0, :3] = 0
        ways = {**GENERATION, "padding": {"attention_mask": masked}}
        if local is False:
            del ways["a static cache"]
        for name, way in ways.items():
            words = []
            for model in models:
                torch.manual_seed(4)
                words.append(model.generate(ids, max_new_tokens=6, **{"do_sample": False, **way}).tolist())
            assert words[0] == words[1], name


@distributed(world_size=2, backends=TORCH, timeout=120)
def test_attentions_and_hidden_states_come_whole(world: World) -> None:
    for sequence in (True, False):
        # Eager attention takes its softmax in float32.
        options = {"sequence_parallel": sequence}
        reference, model = both(world, options=options, attn_implementation="eager")
        asked = {"output_attentions": True, "output_hidden_states": True}
        expected, found = (m(ids_of(world, 7), **asked) for m in (reference, model))
        for name in ("attentions", "hidden_states"):
            assert len(found[name]) == len(expected[name]) >= 2
            for x, y in zip(found[name], expected[name], strict=True):
                assert not isinstance(x, DTensor)
                assert_parity(x.detach(), y.detach(), **ROUNDED, name=name)


@distributed(world_size=(2, 3), backends=TORCH, timeout=120)
def test_embeddings_masks_and_positions_are_taken_as_in_one_process(world: World) -> None:
    reference, model = both(world)
    ids = ids_of(world, 7)
    random = torch.Generator().manual_seed(1)
    embeds = torch.randn((2, 7, SIZES["hidden_size"]), generator=random, dtype=torch.float64).to(world.device)
    masked = torch.ones_like(ids)
    masked[0, :3] = 0
    for given in (
        {"inputs_embeds": embeds},
        {"input_ids": ids, "position_ids": torch.arange(7, device=world.device)[None] + 3},
        {"input_ids": ids, "attention_mask": masked},
        {"input_ids": ids, "logits_to_keep": 2},
    ):
        expected, found = reference(**given).logits, model(**given).logits
        kept = masked.bool() if "attention_mask" in given else slice(None)
        assert_parity(whole(found)[kept], expected.detach()[kept], **CLOSE, name=", ".join(given))
    hidden = [m.model(inputs_embeds=embeds).last_hidden_state for m in (reference, model)]
    assert_parity(whole(hidden[1]), hidden[0].detach(), **CLOSE, name="the model below the head")


@distributed(world_size=2, backends=TORCH)
def test_logits_stay_cut_only_while_gradients_are_recorded(world: World) -> None:
    _, model = both(world)
    ids = ids_of(world, 6)
    assert isinstance(model(ids).logits, DTensor)
    assert not isinstance(model(ids, labels=ids).loss, DTensor)
    with torch.no_grad():
        assert not isinstance(model(ids, labels=ids).logits, DTensor)


def recompute_layers(model: Any, options: dict[str, bool]) -> None:
    """By the name that the installed release has for it: 5.20, the last for Python 3.10, has the older one."""
    known = hasattr(model, "activation_checkpointing_enable")
    (model.activation_checkpointing_enable if known else model.gradient_checkpointing_enable)(options)


@pytest.mark.parametrize("reentrant", [True, False])
@distributed(world_size=2, backends=TORCH)
def test_recomputed_layers_have_the_same_gradients(world: World, reentrant: bool) -> None:
    reference, model = both(world)
    for m in (reference, model):
        m.train()
        recompute_layers(m, {"use_reentrant": reentrant})
        square_of(m(ids_of(world, 7), use_cache=False).logits).backward()
    assert_parity(gradients(model), gradients(reference), **CLOSE, name="gradients")


@distributed(world_size=(2, 3), backends=TORCH, timeout=180)
def test_the_loss_of_routers_is_added_to_that_of_words(world: World) -> None:
    """Asked for in the configuration or at the call, added by the model or outside; every rank routes alike, so nothing is summed twice."""
    ids = ids_of(world, 7)
    for sequence, cut, by_call, labelled in product((True, False), repeat=4):
        what = f"sequence {sequence}, loss parallel {cut}, by call {by_call}, labels {labelled}"
        changes = {} if by_call else {"output_router_logits": True}
        options = {"sequence_parallel": sequence, "loss_parallel": cut}
        reference, model = both(world, "mixtral", options, router_aux_loss_coef=0.5, **changes)
        asked: dict[str, Any] = {"output_router_logits": True} if by_call else {}
        if labelled:
            asked["labels"] = ids
        if cut and by_call and labelled:
            with pytest.raises(ValueError, match="labels and output_router_logits=True .* before plan_for"):
                model(ids, **asked)
            with torch.no_grad():
                losses = [whole(m(ids, **asked).loss) for m in (model, reference)]
            assert_parity(*losses, **ROUNDED, name=f"loss without gradients, {what}")
            continue
        outputs = [m(ids, **asked) for m in (reference, model)]
        for output in outputs:
            loss = output.loss
            if not labelled:
                own = square_of(output.logits)
                loss = (own.full_tensor() if isinstance(own, DTensor) else own) + 0.5 * output.aux_loss
            loss.backward()
        for name in ("loss", "aux_loss") if labelled else ("aux_loss",):
            assert_parity(
                whole(outputs[1][name]), outputs[0][name].detach(), **ROUNDED, name=f"{name}, {what}"
            )
        for found, expected in zip(outputs[1].router_logits, outputs[0].router_logits, strict=True):
            assert_parity(whole(found), expected.detach(), **ROUNDED, name=f"logits of routers, {what}")
        assert_parity(gradients(model), gradients(reference), **ROUNDED, name=f"gradients, {what}")


@distributed(world_size=(2, 4), backends=TORCH)
def test_a_layer_sends_what_the_textbook_says(world: World) -> None:
    """Per layer two all-reduces each way, or two gathers and two reduce-scatters each way; and nothing of all words' logits."""
    ids = ids_of(world, 8)
    sizes = {"num_key_value_heads": 4, "attention_bias": False, "mlp_bias": False}
    for sequence in (False, True):
        counts = []
        for layers in (1, 2):
            options = {"sequence_parallel": sequence}
            _, model = both(world, options=options, num_hidden_layers=layers, **sizes)
            steps = []
            with count_collectives() as counted:
                loss = model(ids, labels=ids).loss
            steps.append(dict(counted.counts))
            with count_collectives() as counted:
                loss.backward()
            steps.append(dict(counted.counts))
            counts.append(steps)
        of_layer = [
            {kind: two[kind] - one.get(kind, 0) for kind in two if two[kind] != one.get(kind, 0)}
            for one, two in zip(*counts, strict=True)
        ]
        if sequence:
            # The two norms hold whole weights, of whose gradients every rank has a summand.
            assert of_layer == [
                {"all_gather": 2, "reduce_scatter": 2},
                {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 2},
            ]
        else:
            assert of_layer == [{"all_reduce": 2}, {"all_reduce": 2}]


@distributed(world_size=(2, 4), backends=TORCH)
def test_the_loss_moves_a_few_numbers_per_word_and_no_logits(world: World) -> None:
    """With 2001 words the logits have 2001 numbers per place, and everything else at most 34."""
    ids = ids_of(world, 8)
    sizes = {"vocab_size": 2001, "num_hidden_layers": 1, "num_key_value_heads": 4}
    for sequence in (False, True):
        reference, model = both(world, options={"sequence_parallel": sequence}, **sizes)
        expected = reference(ids, labels=ids).loss
        with count_collectives() as counted:
            found = model(ids, labels=ids)
            found.loss.backward()
        assert_parity(whole(found.loss), expected.detach(), **ROUNDED, name="loss")
        assert isinstance(found.logits, DTensor)
        # The gradient of the hidden states, 24 numbers, is all that comes back from the head.
        assert max(launch.nbytes for launch in counted.record.launches) <= ids.numel() * 34 * 8
