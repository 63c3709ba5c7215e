"""The usual names of the parts of a transformer: what a sub-module is, read from the name of its attribute.

The tables hold what the common implementations call their parts: Llama's original code and its descendants (``wq``, ``w1``),
Hugging Face's models (``q_proj``, ``gate_proj``, ``fc1``, ``c_fc``), Megatron's (``dense_h_to_4h``) and torch's own layers
(``linear1``). Where one name means different things (``w2``, ``gate``), its siblings decide: :mod:`hp_tp.plans.anatomy`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

QUERY = frozenset({"q_proj", "wq", "query", "to_q", "q_lin", "query_proj", "linear_q", "q"})
KEY = frozenset({"k_proj", "wk", "key", "to_k", "k_lin", "key_proj", "linear_k", "k"})
VALUE = frozenset({"v_proj", "wv", "value", "to_v", "v_lin", "value_proj", "linear_v", "v"})
QKV = frozenset({"qkv", "qkv_proj", "wqkv", "Wqkv", "query_key_value", "qkv_linear", "to_qkv", "linear_qkv"})
ATTENTION_OUT = frozenset(
    {"o_proj", "wo", "out_proj", "to_out", "out_lin", "linear_out", "dense", "proj", "out", "o"}
)
GATE = frozenset({"gate_proj", "w1", "wi_0", "gate"})
UP = frozenset(
    {"up_proj", "w3", "wi_1", "fc1", "c_fc", "fc_in", "dense_h_to_4h", "linear1", "lin1", "up", "wi"}
)
GATE_UP = frozenset({"gate_up_proj", "w13", "gate_up", "linear_gate_up"})
DOWN = frozenset(
    {"down_proj", "w2", "fc2", "c_proj", "fc_out", "dense_4h_to_h", "linear2", "lin2", "down", "wo"}
)
PROJECTIONS = QUERY | KEY | VALUE | QKV | ATTENTION_OUT | GATE | UP | GATE_UP | DOWN | {"c_attn"}
EXPERTS = frozenset({"experts"})
ROUTER = frozenset({"gate", "router"})
EMBEDDING = frozenset(
    {
        "embed_tokens",
        "tok_embeddings",
        "token_embedding",
        "token_embeddings",
        "word_embeddings",
        "embed_in",
        "embedding",
        "embeddings",
        "embed",
        "wte",
        "tok_emb",
    }
)
HEAD = frozenset({"lm_head", "head", "output", "embed_out", "output_layer", "unembed", "unembedding"})

HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads", "nhead")
"""Attributes of attention modules and of configurations with the number of query heads."""
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
"""The same for heads of keys and values; without one there are as many as of queries."""
HEAD_DIM = ("head_dim", "head_size", "d_head", "dim_head", "attention_head_size")
"""The same for the size of a head."""
CONFIGURATION = ("config", "args", "params", "cfg", "hparams")
"""Attributes of modules that hold a configuration."""

T = TypeVar("T")


def is_norm(name: str) -> bool:
    """Whether a sub-module with this attribute name is a normalisation: ``input_layernorm``, ``q_norm``, ``ln_1``, ``norm2``."""
    return "norm" in name.lower() or name.startswith("ln_") or name in ("ln", "ln1", "ln2")


def one_of(children: Mapping[str, T], names: Iterable[str]) -> str | None:
    """The first child with one of these names, in the order of the children."""
    wanted = frozenset(names)
    return next((name for name in children if name in wanted), None)


def last_part(name: str) -> str:
    """The attribute's name at the end of a dotted one."""
    return name.rpartition(".")[2]


def joined(prefix: str, name: str) -> str:
    """The dotted name of a child."""
    return f"{prefix}.{name}" if prefix and name else prefix or name
