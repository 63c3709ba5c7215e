"""What a plan does, as text and as a drawing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hp_dtensor import PrepareModuleInput, Replicate, Shard
from hp_platform.testing import World, distributed
from hp_tp import ColwiseParallel, RowwiseParallel, SequenceParallel, show_plan

sys.path.insert(0, str(Path(__file__).parent))
from tp_models import Config, model_of

CUT = Shard(1)
SVG = "{http://www.w3.org/2000/svg}"


def plan_of(between: Any) -> dict[str, Any]:
    """Of the small model, with activations between the blocks whole or cut along tokens."""
    plan: dict[str, Any] = {"embed": RowwiseParallel(output_layouts=between)}
    for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
        plan[f"layers.*.{name}"] = ColwiseParallel(input_layouts=between)
    for name in ("attention.o", "mlp.down"):
        plan[f"layers.*.{name}"] = RowwiseParallel(output_layouts=between)
    if between == CUT:
        plan |= {f"layers.*.{name}": SequenceParallel() for name in NORMS}
    return plan


NORMS = ("norm1", "norm2")


@distributed(world_size=1)
def test_the_text_says_what_travels_at_every_door(world: World) -> None:
    model = model_of(world, Config(layers=1))
    lines = show_plan(model, plan_of(CUT)).splitlines()
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    assert lines[0].startswith("module")
    assert rows["embed"] == "ids ids rows summands reduce-scatter [all-gather] tokens"
    entering = "tokens all-gather [reduce-scatter] whole columns features features"
    assert rows["layers.*.attention.q"] == rows["layers.*.mlp.gate"] == entering
    assert rows["layers.*.attention.k"] == "tokens the same whole columns features features"
    leaving = "features features rows summands reduce-scatter [all-gather] tokens"
    assert rows["layers.*.attention.o"] == rows["layers.*.mlp.down"] == leaving
    assert rows[f"layers.*.{NORMS[0]}"] == "tokens tokens whole tokens tokens"


@distributed(world_size=1)
def test_whole_activations_are_reduced_instead(world: World) -> None:
    lines = show_plan(model_of(world, Config(layers=1)), plan_of(Replicate())).splitlines()
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    assert rows["layers.*.attention.q"] == "whole [all-reduce] whole columns features features"
    assert rows["layers.*.attention.o"] == "features features rows summands all-reduce whole"


@distributed(world_size=1)
def test_an_input_that_is_moved_in_front_of_several_modules_is_moved_there(world: World) -> None:
    plan = plan_of(Replicate()) | {
        "layers.*.attention": PrepareModuleInput(input_layouts=(CUT,), desired_input_layouts=(Replicate(),))
    }
    lines = show_plan(model_of(world, Config(layers=1)), plan).splitlines()
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    assert rows["layers.*.attention"] == "tokens all-gather [reduce-scatter] whole"
    assert rows["layers.*.attention.q"] == "whole whole columns features features"


@distributed(world_size=1)
def test_what_a_norm_in_front_hands_out_as_a_dtensor_is_known_to_lie_so(world: World) -> None:
    plan = {
        "layers.*.norm1": SequenceParallel(input_layouts=Replicate()),
        "layers.*.attention.q": ColwiseParallel(),
        "head": ColwiseParallel(),
    }
    rows = {
        line.split()[0]: line.split()[1]
        for line in show_plan(model_of(world, Config(layers=1)), plan).splitlines()
    }
    assert rows["layers.*.norm1"] == rows["head"] == "whole"
    assert rows["layers.*.attention.q"] == "tokens"


@distributed(world_size=1)
def test_keys_whose_heads_do_not_divide_are_whole_on_every_rank(world: World, tmp_path: Path) -> None:
    plan = {"layers.*.attention.k": ColwiseParallel(heads=6, query_heads=12, replicate_kv=True)}
    model = model_of(world, Config(layers=1))
    for num_ranks, weight in ((3, "columns"), (4, "whole")):
        text = show_plan(model, plan, num_ranks=num_ranks, path=tmp_path / "plan.svg")
        assert text.splitlines()[1].split() == [
            "layers.*.attention.k",
            "whole",
            "[all-reduce]",
            "whole",
            weight,
            "features",
            "features",
        ]
        assert ("gradient all-reduced" in (tmp_path / "plan.svg").read_text()) is (weight == "whole")


@distributed(world_size=1)
def test_rows_stand_in_the_order_of_the_model(world: World) -> None:
    model = model_of(world, Config(layers=1))
    plan = plan_of(CUT)
    backwards = dict(reversed(plan.items()))
    names = [line.split()[0] for line in show_plan(model, backwards).splitlines()[1:]]
    modules = [name.replace("layers.0", "layers.*") for name, _ in world.platform.named_modules(model)]
    assert names == [name for name in modules if name in plan]


@distributed(world_size=1)
def test_the_drawing_shows_every_piece_and_is_the_same_each_time(world: World, tmp_path: Path) -> None:
    model, files = model_of(world, Config(layers=1)), [tmp_path / "one.svg", tmp_path / "two.svg"]
    for file in files:
        show_plan(model, {"layers.*.mlp.up": ColwiseParallel(input_layouts=CUT)}, num_ranks=3, path=file)
    assert files[0].read_text() == files[1].read_text()
    drawing = ElementTree.parse(files[0]).getroot()
    texts = [each.text for each in drawing.iter(f"{SVG}text")]
    assert {"layers.*.mlp.up", "ColwiseParallel", "all-gather", "reduce-scatter", "rank 2"} <= set(texts)
    # Paper and row; tokens of three ranks, the whole, then columns of weight, result and output; the legend's four.
    assert len(list(drawing.iter(f"{SVG}rect"))) == 2 + 3 + 1 + 3 * 3 + 4


@distributed(world_size=1)
def test_wrong_calls_name_what_is_wrong(world: World, tmp_path: Path) -> None:
    model, plan = model_of(world, Config(layers=1)), plan_of(CUT)
    with pytest.raises(ValueError, match=r"a file with suffix \.svg, got '.*plan\.png'"):
        show_plan(model, plan, path=tmp_path / "plan.png")
    for wrong in (0, True, 2.0):
        with pytest.raises(ValueError, match="num_ranks is a number of ranks, 1 or more, got"):
            show_plan(model, plan, num_ranks=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the pattern 'layer\.\*' meets no module of this"):
        show_plan(model, {"layer.*": ColwiseParallel()})
    with pytest.raises(ValueError, match="no entry that can be drawn"):
        show_plan(model, {})
    with pytest.raises(TypeError, match="show_plan takes the module that the plan is for, got a dict"):
        show_plan(plan, plan)
