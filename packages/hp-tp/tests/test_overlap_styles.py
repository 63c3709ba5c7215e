"""Styles with ``overlap``: a Llama-like model has the numbers of one process, and moves what it moves without."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import Replicate, Shard, conversions
from hp_platform.testing import World, count_collectives, distributed
from hp_tp import ColwiseParallel, OverlapPolicy, RowwiseParallel, parallelize_module
from hp_tp.styles.moves import cut_along

sys.path.insert(0, str(Path(__file__).parent))
from tp_models import Config, activation, block_of, make_mesh, model_of, token_ids
from tp_plans import block_plan, model_plan
from tp_training import backward, check_steps, cross_entropy, mean_square

POLICIES = {
    "plain": True,
    "whole": OverlapPolicy(min_nbytes=0, features_per_peer=1000),
    "cut": OverlapPolicy(min_nbytes=0, features_per_peer=0, chunk_nbytes=0, max_chunks=2),
    "sends": OverlapPolicy(min_nbytes=0, gather_by="sends"),
}
CONFIG = Config(layers=1)
FEW = Config(heads=4, kv_heads=2, head_dim=4, hidden=10, layers=1)


def overlapping(plan: Mapping[str, Any], overlap: Any) -> dict[str, Any]:
    """The plan with the switch on in all linear layers between which the sequence is cut."""
    found = dict(plan)
    for pattern, style in plan.items():
        is_linear = not pattern.endswith("embed")
        if is_linear and isinstance(style, ColwiseParallel):
            style.overlap = ColwiseParallel(overlap=overlap).overlap
        elif is_linear and isinstance(style, RowwiseParallel):
            style.overlap = RowwiseParallel(output_layouts=Shard(1), overlap=overlap).overlap
    return found


@pytest.mark.parametrize("policy", POLICIES)
@distributed(world_size=(2, 3))
def test_three_steps_of_a_layer_are_those_of_one_process(world: World, policy: str) -> None:
    platform, mesh = world.platform, make_mesh(world)

    def reference_loss_of(layer: Any, step: int) -> Any:
        return mean_square(platform, layer(activation(world, CONFIG, step)))

    def loss_of(layer: Any, step: int) -> Any:
        """Of this rank's piece of the same input."""
        whole = activation(world, CONFIG, step)
        cut = cut_along(mesh, 1, tuple(whole.shape))
        y = layer(conversions.slice_out(whole, cut))
        return mean_square(platform, conversions.gather(y, cut))

    check_steps(
        world,
        lambda: block_of(world, CONFIG),
        overlapping(block_plan(CONFIG, world.size, sequence=True), POLICIES[policy]),
        loss_of,
        reference_loss_of=reference_loss_of,
    )


# MindSpore 2.10 has no kernel for its own Embedding on CPU.
WITH_EMBEDDINGS = ("torch", "cuda", "npu")


@pytest.mark.parametrize("policy", POLICIES)
@distributed(world_size=(2, 4), backends=WITH_EMBEDDINGS)
def test_three_steps_of_a_model_are_those_of_one_process(world: World, policy: str) -> None:
    config = replace(FEW if world.size == 4 else CONFIG, tied=True)

    def loss_of(model: Any, step: int) -> Any:
        ids, targets = token_ids(world, config, step)
        return cross_entropy(world.platform, model(ids), targets)

    plan = overlapping(model_plan(config, world.size, sequence=True), POLICIES[policy])
    check_steps(world, lambda: model_of(world, config), plan, loss_of)


@pytest.mark.parametrize("policy", POLICIES)
@distributed(world_size=3, backends=WITH_EMBEDDINGS)
def test_a_sequence_that_does_not_divide_travels_in_dtensors(world: World, policy: str) -> None:
    for length in (7, 2):
        config = replace(FEW if world.size == 4 else CONFIG, length=length)

        def loss_of(model: Any, step: int, config: Config = config) -> Any:
            ids, targets = token_ids(world, config, step)
            return cross_entropy(world.platform, model(ids), targets)

        plan = model_plan(config, world.size, sequence=True, use_local=False)
        check_steps(
            world, lambda config=config: model_of(world, config), overlapping(plan, POLICIES[policy]), loss_of
        )


def moved(world: World, overlap: Any) -> list[tuple[dict[str, int], int]]:
    """Launches by kind, and bytes, of forward and of backward, of two steps."""
    platform = world.platform
    config = replace(CONFIG, bias=False)
    plan = block_plan(config, world.size, sequence=True)
    if overlap is not None:
        plan = overlapping(plan, overlap)
    layer = parallelize_module(block_of(world, config), make_mesh(world), plan)
    whole = activation(world, config)
    own = platform.split(platform.detach(whole), [config.length // world.size] * world.size, 1)[world.rank]
    x = platform.set_requires_grad_(platform.clone(own), True)
    found = []
    for _ in range(2):
        with count_collectives() as forward:
            loss = mean_square(platform, layer(x * 1))
        with count_collectives() as back:
            backward(platform, loss)
        found += [(counted.counts, counted.nbytes()) for counted in (forward, back)]
    return found


@distributed(world_size=(2, 3))
def test_a_layer_moves_the_same_bytes_and_gathers_once_for_all_projections(world: World) -> None:
    plain = moved(world, None)
    assert moved(world, True) == moved(world, POLICIES["whole"]) == plain
    assert plain[0][0] == {"all_gather": 2, "reduce_scatter": 2}
    cut = moved(world, POLICIES["cut"])
    chunks = 2 if world.platform.supports("async_collectives", world.device_type) else 1
    assert [nbytes for _, nbytes in cut] == [nbytes for _, nbytes in plain]
    assert cut[0][0] == {"all_gather": 2, "reduce_scatter": 2 * chunks}
    assert cut[1][0] == plain[1][0]


@distributed(world_size=2)
def test_layers_with_and_without_share_a_gather(world: World) -> None:
    platform, config = world.platform, replace(CONFIG, bias=False)
    plan = block_plan(config, world.size, sequence=True)
    overlapping({"attention.q": plan["attention.q"], "mlp.up": plan["mlp.up"]}, POLICIES["cut"])
    layer = parallelize_module(block_of(world, config), make_mesh(world), plan)
    x = platform.narrow(platform.detach(activation(world, config)), 1, 6 * world.rank, 6)
    x = platform.set_requires_grad_(platform.clone(x), True)
    with count_collectives() as forward:
        loss = mean_square(platform, layer(x * 1))
    forward.assert_counts(all_gather=2, reduce_scatter=2)
    backward(platform, loss)


# ------------------------------------------------------------------------------------------------------------ wrong calls
def test_the_switch_is_true_false_or_a_policy() -> None:
    with pytest.raises(
        ValueError, match="ColwiseParallel: overlap must be True, False or an OverlapPolicy, got 'yes'"
    ):
        ColwiseParallel(overlap="yes")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="RowwiseParallel: overlap must be True, False or an OverlapPolicy, got 1"
    ):
        RowwiseParallel(output_layouts=Shard(1), overlap=1)  # type: ignore[arg-type]


WRONG = {
    "whole result": (
        "layers.0.mlp.down",
        lambda: RowwiseParallel(overlap=True),
        r"RowwiseParallel of Linear: overlap=True is for tensors that are cut along rows, got output_layouts=Replicate\(\): say "
        r"which dim is cut, such as Shard\(1\), or leave overlap out",
    ),
    "result cut along features": (
        "layers.0.mlp.down",
        lambda: RowwiseParallel(output_layouts=Shard(-1), overlap=True),
        r"cut along rows, got output_layouts=Shard\(-1\)",
    ),
    "whole input": (
        "layers.0.mlp.up",
        lambda: ColwiseParallel(input_layouts=Replicate(), overlap=True),
        r"ColwiseParallel of Linear: overlap=True is for tensors that are cut along rows, got input_layouts=Replicate\(\)",
    ),
    "embedding": (
        "embed",
        lambda: RowwiseParallel(output_layouts=Shard(1), overlap=True),
        r"RowwiseParallel of Embedding.*: overlap=True is for linear layers with the framework's own forward",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@distributed(world_size=1)
def test_a_switch_that_cannot_do_anything_is_refused(world: World, name: str) -> None:
    place, style, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        parallelize_module(model_of(world, CONFIG), make_mesh(world), {place: style()})
