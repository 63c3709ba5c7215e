"""Models of other families of transformers under ``plan_for``: what is not known by name is whole, and the numbers are right."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_platform.testing import World, assert_parity, distributed
from hp_tp import plan_for

sys.path.insert(0, str(Path(__file__).parent))
import transformers_models
from transformers_models import CLOSE, ROUNDED, gradients, ids_of, parallel, square_of, whole

MIXTURE = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "experts_implementation": "eager",
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fused projections": ("Phi3Config", "Phi3ForCausalLM", {}),
    "norms over all heads": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "four norms, windows, soft caps": ("Gemma2Config", "Gemma2ForCausalLM", {"sliding_window": 4}),
    "parallel blocks, fused by heads": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {"hidden_size": 48}),
    "layers that hold fc1 and fc2": (
        "OPTConfig",
        "OPTForCausalLM",
        {"ffn_dim": 40, "word_embed_proj_dim": 24, "max_position_embeddings": 64, "dropout": 0.0},
    ),
    "a shared expert": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**MIXTURE, "shared_expert_intermediate_size": 14},
    ),
    "an encoder and a decoder": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "d_model": 24,
            "d_ff": 40,
            "d_kv": 4,
            "num_layers": 2,
            "num_heads": 6,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 1,
        },
    ),
}
FLOAT32_BETWEEN_RANKS = ("norms over all heads", "four norms, windows, soft caps", "a shared expert")
"""Their norms or routers add up float32 numbers in another order than one process."""


def build(name: str, **changes: Any) -> Any:
    transformers_models.KINDS.update(FAMILIES)
    return transformers_models.build(name, **changes)


@pytest.mark.parametrize("name", list(FAMILIES))
@distributed(world_size=2, backends=("torch",), timeout=120)
def test_logits_gradients_and_words_are_those_of_one_process(world: World, name: str) -> None:
    limits = ROUNDED if name in FLOAT32_BETWEEN_RANKS else CLOSE
    ids = ids_of(world, 7)
    for sequence in (True, False):
        reference, model = (build(name).to(world.device).eval() for _ in range(2))
        parallel(world, model, sequence_parallel=sequence)
        given = {"decoder_input_ids": ids} if name == "an encoder and a decoder" else {}
        expected, found = (m(ids, **given).logits for m in (reference, model))
        assert_parity(whole(found), expected.detach(), **limits, name="logits")
        for logits in (expected, found):
            square_of(logits).backward()
        assert_parity(gradients(model), gradients(reference), **limits, name="gradients")
        words = [m.generate(ids, max_new_tokens=4, do_sample=False).tolist() for m in (reference, model)]
        assert words[0] == words[1]


@distributed(world_size=2, backends=("torch",), timeout=120)
def test_grouped_products_of_experts_take_parts_of_whole_sixteen_bytes(world: World) -> None:
    """float32: 4 elements. 16 are 8 and 8; of 20 a rank has 10."""
    ids, name = ids_of(world, 7), "mixtral"
    changes = {"experts_implementation": "grouped_mm", "num_hidden_layers": 1}
    reference, model = (build(name, intermediate_size=16, **changes).float() for _ in range(2))
    parallel(world, model)
    expected, found = (m(ids).logits for m in (reference, model))
    limits = {"rtol": 0.0, "atol": 1e-4}  # float32
    assert_parity(whole(found), expected.detach(), **limits, name="logits")
    for logits in (expected, found):
        square_of(logits).backward()
    assert_parity(gradients(model), gradients(reference), **limits, name="gradients")
    for inner in (20, 4):
        model = build(name, intermediate_size=inner, **changes).float()
        with pytest.raises(
            ValueError,
            match=rf"^'model\.layers\.0\.mlp\.experts': StackedExperts: the inner size {inner} of this MixtralExperts is cut over 2 "
            rf"ranks into {inner // 2}, {inner // 2}, but grouped_mm takes multiples of 4 elements of 4 bytes: let the model .* "
            r'model\.set_experts_implementation\("batched_mm"\)',
        ):
            parallel(world, model)
        for way in ("batched_mm", "eager"):
            reference, model = (build(name, intermediate_size=inner, **changes).float() for _ in range(2))
            model.set_experts_implementation(way)
            parallel(world, model)
            assert_parity(whole(model(ids).logits), reference(ids).logits.detach(), **limits, name=way)


def test_layers_that_are_not_linear_are_named_in_the_refusal() -> None:
    transformers_models.KINDS["gpt2"] = (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 48, "n_layer": 1, "n_head": 12},
    )
    with pytest.raises(ValueError, match="'transformer.h.0.attn.c_attn': a Conv1D is no linear layer"):
        plan_for(build("gpt2"))
