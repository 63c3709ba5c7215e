"""A plan for a plain tree of modules, made from their names: it trains as one process does, and can be read and changed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import Replicate, Shard
from hp_platform.testing import World, distributed
from hp_tp import (
    ColwiseParallel,
    OverlapPolicy,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
    plan_for,
)

sys.path.insert(0, str(Path(__file__).parent))
from tp_models import Config, make_mesh, model_of, token_ids
from tp_training import check_steps, mean_square

SWITCHES: list[dict[str, Any]] = [
    {"sequence_parallel": sequence, "loss_parallel": loss}
    for sequence in (True, False)
    for loss in (True, False)
]


def check_model(world: World, config: Config, plan: Any) -> None:
    """Three steps of a plain model, built of the framework's layers, under its plan."""

    def loss_of(model: Any, step: int) -> Any:
        return mean_square(world.platform, model(token_ids(world, config, step)[0]))

    check_steps(world, lambda: model_of(world, config), plan, loss_of)


@pytest.mark.parametrize("local", [None, True])
@distributed(world_size=(1, 2, 3), timeout=120)
def test_three_steps_of_a_plain_tree_are_those_of_one_process(world: World, local: bool | None) -> None:
    """7 places divide over one rank only. None: attention on DTensors, since nobody knows how its code counts heads."""
    for number in (0, 3) if local else (1, 2):
        config = Config(tied=number < 2, length=7, layers=1)
        options = {"local_attention": local, **SWITCHES[number]}
        check_model(world, config, plan_for(model_of(world, config), **options))


@distributed(world_size=4, min_world_size=2, timeout=120)
def test_keys_and_values_that_do_not_divide_are_replicated(world: World) -> None:
    for number, kv_heads in enumerate((6, 2, 1)):
        if kv_heads % world.size == 0:
            continue  # with 2 ranks only one head is too few
        config = Config(kv_heads=kv_heads, layers=1, length=5)
        for local in (None, True):
            options = {"replicate_kv": True, "local_attention": local, **SWITCHES[number]}
            check_model(world, config, plan_for(model_of(world, config), **options))


@distributed(world_size=(2, 3), backends=("torch", "cuda"))
def test_layers_that_communicate_beside_their_products_give_the_same_numbers(world: World) -> None:
    """With a policy that cuts products of any size."""
    config = Config(length=7, layers=1, tied=True)
    overlap = OverlapPolicy(min_nbytes=0, features_per_peer=0, chunk_nbytes=0)
    plan = plan_for(model_of(world, config), local_attention=True, overlap=overlap)
    assert plan["layers.*.mlp.down"].overlap == plan["head"].overlap == overlap
    check_model(world, config, plan)


@distributed(world_size=2)
def test_a_plan_is_a_dict_that_can_be_changed(world: World) -> None:
    config = Config(layers=2, length=4)
    plan = plan_for(model_of(world, config), sequence_parallel=False)
    assert isinstance(plan, dict)
    for name in ("gate", "up", "down"):
        del plan[f"layers.*.mlp.{name}"]
    plan["layers.0.mlp.gate"] = plan["layers.0.mlp.up"] = ColwiseParallel()
    plan["layers.0.mlp.down"] = RowwiseParallel()
    check_model(world, config, plan)
    model = parallelize_module(model_of(world, config), make_mesh(world), plan)
    platform = world.platform
    cut, whole = (platform.get_submodule(model, f"layers.{i}.mlp.gate").weight for i in (0, 1))
    assert cut.placements == (Shard(0),)
    assert not hasattr(whole, "placements")


@distributed(world_size=1)
def test_a_plan_names_patterns_styles_and_what_each_module_is(world: World) -> None:
    plan = plan_for(model_of(world, Config(layers=2)))
    styles = {pattern: type(style) for pattern, style in plan.items()}
    assert styles["layers.*.attention.q"] is ColwiseParallel
    assert styles["layers.*.attention.o"] is RowwiseParallel
    assert styles["layers.*.norm1"] is SequenceParallel
    assert styles["embed"] is RowwiseParallel
    assert plan["embed"].output_layouts == Shard(1)
    assert plan["head"].output_layouts == Shard(-1)
    assert plan.replicated == {}
    table = str(plan).splitlines()
    assert len(table) == len(plan) + 2
    (row,) = [line for line in table if line.startswith("layers.*.attention.q ")]
    assert row.split()[1:5] == ["ColwiseParallel", "Shard(1)", "->", "Shard(-1)"]
    assert "its code may count on the whole number of heads" in row


@distributed(world_size=1)
def test_without_sequence_and_loss_parallel_everything_between_layers_is_whole(world: World) -> None:
    plan = plan_for(model_of(world, Config()), sequence_parallel=False, loss_parallel=False)
    assert plan["embed"].output_layouts == plan["head"].output_layouts == Replicate()
    assert not [pattern for pattern, style in plan.items() if isinstance(style, SequenceParallel)]


@distributed(world_size=1)
def test_wrong_calls_say_what_was_given_and_what_to_do(world: World) -> None:
    model = model_of(world, Config(layers=1))
    with pytest.raises(TypeError, match="plan_for takes a module, got dict"):
        plan_for({"layers": []})
    with pytest.raises(ValueError, match="sequence_parallel must be True or False, got 1"):
        plan_for(model, sequence_parallel=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="loss_parallel must be True or False, got None"):
        plan_for(model, loss_parallel=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="replicate_kv must be True or False, got 'yes'"):
        plan_for(model, replicate_kv="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="local_attention must be True, False or None, got 'auto'"):
        plan_for(model, local_attention="auto")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="overlap must be True, False or an OverlapPolicy, got 'auto'"):
        plan_for(model, overlap="auto")
    with pytest.raises(ValueError, match="overlap is for sequence_parallel=True.*leave one of them out"):
        plan_for(model, overlap=True, sequence_parallel=False)
    with pytest.raises(ValueError, match="sequence_dim must be a dim such as 1, got -2"):
        plan_for(model, sequence_dim=-2)
    with pytest.raises(
        ValueError, match="no attention and no feed-forward layer in this RMSNorm: it goes by names such"
    ):
        plan_for(world.platform.get_submodule(model, "norm"))


@distributed(world_size=4, min_world_size=4, backends=("torch", "cuda"))
def test_heads_that_do_not_divide_are_named_when_the_plan_is_applied(world: World) -> None:
    def refused(model: Any, plan: Any, message: str) -> None:
        platform = world.platform
        before = [(type(m), platform.state_dict(m).keys()) for _, m in platform.named_modules(model)]
        with pytest.raises(ValueError, match=message):
            parallelize_module(model, make_mesh(world), plan)
        after = [(type(m), platform.state_dict(m).keys()) for _, m in platform.named_modules(model)]
        assert after == before, "a refused plan changes nothing"

    model = model_of(world, Config(heads=6, kv_heads=6))
    message = (
        r"^'layers\.0\.attention\.q': ColwiseParallel: 6 heads of this Linear do not divide over 4 ranks"
    )
    refused(model, plan_for(model), message)
    model = model_of(world, Config(heads=12, kv_heads=6))
    message = r"^'layers\.0\.attention\.k': .* 6 heads of this Linear do not divide over 4.*replicate_kv=True"
    refused(model, plan_for(model), message)
    plan = plan_for(model, replicate_kv=True)
    plan["layers.*.mlp.gates"] = ColwiseParallel()
    refused(model, plan, "did you mean 'layers")
