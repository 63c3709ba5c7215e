"""What the names of modules tell: which styles trees of other libraries get, on the meta device, and what has no place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hp_tp
import hp_tp.plans
from hp_tp import (
    ColwiseParallel,
    PrepareMixture,
    Replicated,
    RowwiseParallel,
    SequenceParallel,
    StackedExperts,
    plan_for,
)

WIDTH, INNER, HEADS = 24, 40, 6


def tree(**children: Any) -> torch.nn.Module:
    """A module with these children; numbers in a list become a ModuleList."""
    module = torch.nn.Module()
    for name, child in children.items():
        setattr(module, name, torch.nn.ModuleList(child) if isinstance(child, list) else child)
    return module


def linear(rows: int = WIDTH, columns: int = WIDTH) -> torch.nn.Linear:
    return torch.nn.Linear(columns, rows, device="meta")


def attention(names: str, **more: Any) -> torch.nn.Module:
    return tree(**{name: linear() for name in names.split()}, **more)


def feed_forward(names: str) -> torch.nn.Module:
    """The last one leads back."""
    *wide, down = names.split()
    return tree(**{name: linear(INNER) for name in wide}, **{down: linear(WIDTH, INNER)})


@pytest.mark.parametrize(
    ("projections", "inner"),
    [
        ("wq wk wv wo", "w1 w3 w2"),
        ("q_proj k_proj v_proj o_proj", "gate_proj up_proj down_proj"),
        ("query key value dense", "dense_h_to_4h dense_4h_to_h"),
        ("to_q to_k to_v to_out", "fc1 fc2"),
        ("q_proj k_proj v_proj out_proj", "linear1 linear2"),
        ("q_lin k_lin v_lin out_lin", "lin1 lin2"),
        ("q k v o", "wi wo"),
        ("query key value proj", "c_fc c_proj"),
    ],
)
def test_usual_names_of_projections_are_known(projections: str, inner: str) -> None:
    block = tree(attention=attention(projections), feed_forward=feed_forward(inner))
    plan = plan_for(tree(layers=[block, block]), sequence_parallel=False)
    *first, last = projections.split()
    assert all(isinstance(plan[f"layers.*.attention.{name}"], ColwiseParallel) for name in first)
    assert isinstance(plan[f"layers.*.attention.{last}"], RowwiseParallel)
    *first, last = inner.split()
    assert all(isinstance(plan[f"layers.*.feed_forward.{name}"], ColwiseParallel) for name in first)
    assert isinstance(plan[f"layers.*.feed_forward.{last}"], RowwiseParallel)
    assert plan.replicated == {}


@pytest.mark.parametrize("embedding", ["tok_embeddings", "embed_tokens", "wte", "word_embeddings"])
@pytest.mark.parametrize("head", ["lm_head", "output", "head"])
def test_embedding_and_head_are_cut_alike(embedding: str, head: str) -> None:
    model = tree(
        **{embedding: torch.nn.Embedding(50, WIDTH, device="meta"), head: linear(50)},
        layers=[feed_forward("fc1 fc2")],
        final_norm=torch.nn.LayerNorm(WIDTH, device="meta"),
    )
    plan = plan_for(model)
    assert isinstance(plan[embedding], RowwiseParallel)
    assert isinstance(plan[head], ColwiseParallel)
    assert isinstance(plan["final_norm"], SequenceParallel)


def test_heads_come_from_the_module_or_from_a_configuration() -> None:
    module = attention("wq wk wv wo")
    assert plan_for(tree(attention=module))["attention.wq"].heads is None
    for holder in (module, tree(attention=module)):
        holder.config = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=HEADS)
        root = holder if holder is not module else tree(attention=module)
        plan = plan_for(root)
        assert plan["attention.wq"].heads == plan["attention.wk"].heads == plan["attention.wo"].heads == HEADS
    module.n_heads, module.wk, module.wv = HEADS, linear(8), linear(8)
    del module.config
    assert plan_for(tree(attention=module))["attention.wk"].heads == 2


def test_names_that_mean_nothing_are_replicated_and_named() -> None:
    block = feed_forward("fc1 fc2")
    block.memory = linear()
    model = tree(block=block, adapter=linear(), position=torch.nn.Embedding(9, WIDTH, device="meta"))
    plan = plan_for(model)
    assert plan.replicated == {
        "block.memory": "in a feed-forward layer, on whole shapes",
        "adapter": "no usual name",
        "position": "no usual name",
    }
    for name in plan.replicated:
        assert isinstance(plan[name], Replicated)
        (row,) = [line for line in str(plan).splitlines() if line.startswith(f"{name} ")]
        assert "replicated" in row


def test_every_style_that_a_printed_plan_names_is_a_public_one() -> None:
    """A model with everything that a plan has a style for."""
    module = attention("q_proj k_proj v_proj o_proj", q_norm=torch.nn.RMSNorm(WIDTH // HEADS, device="meta"))
    module.config = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=HEADS)
    mixture = tree(gate=linear(3), experts=[feed_forward("w1 w3 w2") for _ in range(3)])
    stacked = tree(gate=linear(3), experts=torch.nn.Module())
    for name, shape in (("gate_up_proj", (3, 2 * INNER, WIDTH)), ("down_proj", (3, WIDTH, INNER))):
        setattr(stacked.experts, name, torch.nn.Parameter(torch.empty(shape, device="meta")))
    norm = torch.nn.RMSNorm(WIDTH, device="meta")
    model = tree(
        embed_tokens=torch.nn.Embedding(50, WIDTH, device="meta"),
        layers=[tree(norm1=norm, attention=module, mlp=mlp) for mlp in (mixture, stacked)],
        adapter=linear(),
        lm_head=linear(50),
    )
    plan = plan_for(model, local_attention=True)
    lines = str(plan).splitlines()
    at = lines[0].index("style")
    names = {line[at:].split()[0] for line in lines[2:]}
    assert names == {type(style).__name__ for style in plan.values()}
    assert names >= {name for name in hp_tp.plans.__all__ if isinstance(getattr(hp_tp.plans, name), type)} - {
        "ParallelPlan"
    }
    for name in names:
        assert name in hp_tp.__all__
        assert getattr(hp_tp, name) in {type(style) for style in plan.values()}


class Conv1D(torch.nn.Module):
    """A layer with a weight ``(in, out)``, of which a style that takes it for a linear one would cut the wrong dim."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(WIDTH, WIDTH, device="meta"))


def test_layers_of_other_kinds_under_usual_names_are_no_projections() -> None:
    plan = plan_for(tree(mlp=feed_forward("fc1 fc2"), other=tree(c_fc=Conv1D(), c_proj=Conv1D())))
    assert plan.replicated == {
        "other.c_fc": "a Conv1D is no linear layer",
        "other.c_proj": "a Conv1D is no linear layer",
    }


def test_layers_that_differ_are_named_one_by_one() -> None:
    model = tree(layers=[tree(mlp=feed_forward("fc1 fc2")), tree(mlp=tree(fc1=Conv1D(), fc2=Conv1D()))])
    plan = plan_for(model)
    assert isinstance(plan["layers.0.mlp.fc1"], ColwiseParallel)
    assert isinstance(plan["layers.1.mlp.fc1"], Replicated)
    assert "layers.*.mlp.fc1" not in plan


def test_dropout_and_fused_projections_keep_whole_shapes() -> None:
    mlp = feed_forward("fc1 fc2")
    assert plan_for(tree(mlp=mlp))["mlp.fc1"].use_local_output
    mlp.dropout = torch.nn.Dropout(0.1)
    assert not plan_for(tree(mlp=mlp))["mlp.fc1"].use_local_output
    mlp.dropout = torch.nn.Dropout(0.0)
    assert plan_for(tree(mlp=mlp))["mlp.fc1"].use_local_output
    mlp = feed_forward("gate_up_proj down_proj")
    plan = plan_for(tree(mlp=mlp))
    assert not plan["mlp.gate_up_proj"].use_local_output
    assert "taken apart by whole sizes" in plan.notes["mlp.gate_up_proj"]


def test_a_mixture_has_a_whole_router_and_cut_experts() -> None:
    several = tree(gate=linear(4), experts=[feed_forward("w1 w3 w2") for _ in range(4)])
    stacked = torch.nn.Module()
    stacked.gate_up_proj = torch.nn.Parameter(torch.empty(4, 2 * INNER, WIDTH, device="meta"))
    stacked.down_proj = torch.nn.Parameter(torch.empty(4, WIDTH, INNER, device="meta"))
    model = tree(
        first=several,
        second=tree(
            router=linear(4), experts=stacked, shared_expert=feed_forward("gate_proj up_proj down_proj")
        ),
    )
    plan = plan_for(model)
    assert isinstance(plan["first"], PrepareMixture)
    assert isinstance(plan["first.gate"], Replicated)
    assert isinstance(plan["first.experts.*.w1"], ColwiseParallel)
    assert plan["first.experts.*.w2"].use_local_output, "inside of a mixture everything is whole and plain"
    assert isinstance(plan["second.experts"], StackedExperts)
    assert isinstance(plan["second.shared_expert.down_proj"], RowwiseParallel)
    assert plan.replicated == {}
