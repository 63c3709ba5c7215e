"""``describe``: the table of a model that is laid out, and what was sent in a step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import Replicate, Shard
from hp_platform.testing import World, distributed
from hp_tp import ColwiseParallel, describe, parallelize_module

sys.path.insert(0, str(Path(__file__).parent))
from tp_models import BATCH, Config, dtype_of, make_mesh, model_of, token_ids
from tp_plans import model_plan
from tp_training import backward, cross_entropy

CONFIG = Config(heads=4, kv_heads=2, head_dim=4, hidden=10, layers=1, tied=True)


def laid_out(world: World, **kwargs: Any) -> Any:
    plan = model_plan(CONFIG, world.size, **kwargs)
    return parallelize_module(model_of(world, CONFIG), make_mesh(world), plan)


@distributed(world_size=2)
def test_every_parameter_has_a_row_with_its_pieces_bytes(world: World) -> None:
    found = describe(laid_out(world))
    item = 8 if dtype_of(world) == "float64" else 4
    rows = {f"{row.module}.{row.parameter}": row for row in found.rows}
    assert rows["embed.weight"].placements == (Shard(0),)
    assert rows["embed.weight"].nbytes == 25 * 16 * item
    assert rows["layers.0.attention.o.weight"].placements == (Shard(1),)
    assert rows["layers.0.attention.o.bias"].placements == (Replicate(),)
    assert rows["layers.0.mlp.up.weight"].shape == (10, 16)
    assert rows["layers.0.norm1.weight"].placements is None
    assert rows["head.weight"].tied_to == "embed.weight"
    untied = [row for row in found.rows if row.tied_to is None]
    assert found.nbytes == sum(row.nbytes for row in untied)


@distributed(world_size=2)
def test_the_table_has_a_line_per_parameter_and_says_what_is_sent(world: World) -> None:
    found = describe(laid_out(world, sequence=True))
    item = 8 if dtype_of(world) == "float64" else 4
    lines = str(found).splitlines()
    assert lines[0].split() == (
        ["module", "parameter", "shape", "placements", "bytes", "per", "rank", "collectives", "per", "step"]
    )
    assert len(lines) == len(found.rows) + 3
    (down,) = (line for line in lines if line.startswith("layers.0.mlp.down") and " weight " in line)
    assert "16x10" in down
    assert f"forward: reduce_scatter of the result {16 * item} B/row" in down
    assert "all_gather of the result's gradient" in down.partition("backward: ")[2]
    (norm,) = (line for line in lines if line.startswith("layers.0.norm1"))
    assert f"all_reduce of weight's gradient {16 * item} B" in norm
    (head,) = (line for line in lines if line.startswith("head"))
    assert "tied to embed.weight" in head
    assert lines[-1] == f"{found.nbytes:,d} bytes of parameters on this rank"


@distributed(world_size=2)
def test_an_embedding_by_columns_says_that_its_result_is_gathered(world: World) -> None:
    item = 8 if dtype_of(world) == "float64" else 4
    model = model_of(world, CONFIG)
    parallelize_module(model, make_mesh(world), {"embed": ColwiseParallel(output_layouts=Replicate())})
    (sent,) = describe(model).traffic["embed"].declared.forward
    assert str(sent) == f"all_gather of the result {16 * item} B/row"


@distributed(world_size=2)
def test_a_step_that_is_watched_tells_what_was_started_where(world: World) -> None:
    platform, model = world.platform, laid_out(world)
    ids, targets = token_ids(world, CONFIG)
    before = dict(vars(model.embed))
    found = describe(model, lambda: backward(platform, cross_entropy(platform, model(ids), targets)))
    item = 8 if dtype_of(world) == "float64" else 4
    nbytes = BATCH * CONFIG.length * CONFIG.width * item
    assert found.traffic["layers.0.attention.o"].forward == (f"all_reduce {nbytes:,d} B",)
    assert found.traffic["layers.0.attention.q"].forward == ()
    assert found.step is not None
    # Forward: the embedding and two in the layer. Backward: two in the layer, one in front of the head.
    assert found.step.counts()["all_reduce"] == 6
    assert str(found).splitlines()[-1].startswith("one step: ")
    assert vars(model.embed)["_hp_forward"] is before["_hp_forward"]


def test_only_a_module_is_described() -> None:
    with pytest.raises(TypeError, match="describe takes a module, got int"):
        describe(3)
