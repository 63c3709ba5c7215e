"""The picture of a step's memory: what a run really gathers, at most what the plan says, and the same file every time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hp_fsdp import MemoryPlan, UnitMemory, fully_shard, memory_plan, parts, show_memory
from hp_fsdp.memory_steps import LAYERS, moments_of
from hp_fsdp.states import ShardState
from hp_fsdp.unit import unit_of
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import PROGRAMS, Maker, loss_of, make_mesh

MEBI = 2**20


def unit(name: str, **fields: Any) -> UnitMemory:
    sizes = {
        "shards": 1,
        "gradients": 1,
        "whole": 4,
        "kept_whole": 0,
        "kept_piece": 0,
        "staging": 1,
        "whole_gradients": 4,
        "reduction": 5,
    }
    given = {key: int(value * MEBI) for key, value in {**sizes, **fields}.items() if key in sizes}
    flags = {"stays_whole": name == "", "is_offloaded": False, **fields}
    return UnitMemory(
        name=name,
        **given,
        **{key: value for key, value in flags.items() if key not in sizes},
    )


PLAN = MemoryPlan(
    (unit("", whole=2, whole_gradients=2, reduction=3), *(unit(f"blocks.{k}") for k in range(4)))
)


@pytest.mark.once
def test_a_step_as_text_has_a_row_for_every_unit_in_both_directions_and_one_for_the_optimizer() -> None:
    assert show_memory(PLAN, activations={"blocks.1": 8 * MEBI, "": MEBI}, optimizer_state=10 * MEBI).splitlines() == [
        "phase      unit      shards  optimizer  gradients  root  running  ahead  whole_gradients  reductions  activations  total",
        "forward    root        5.00      10.00       0.00  2.00     0.00   4.00             0.00        0.00         1.00  22.00",
        "forward    blocks.0    5.00      10.00       0.00  2.00     4.00   4.00             0.00        0.00         1.00  26.00",
        "forward    blocks.1    5.00      10.00       0.00  2.00     4.00   4.00             0.00        0.00         9.00  34.00",
        "forward    blocks.2    5.00      10.00       0.00  2.00     4.00   4.00             0.00        0.00         9.00  34.00",
        "forward    blocks.3    5.00      10.00       0.00  2.00     4.00   0.00             0.00        0.00         9.00  30.00",
        "forward    root        5.00      10.00       0.00  2.00     0.00   0.00             0.00        0.00         9.00  26.00",
        "backward   root        5.00      10.00       0.00  2.00     0.00   4.00             2.00        0.00         9.00  32.00",
        "backward   blocks.3    5.00      10.00       1.00  2.00     4.00   4.00             6.00        5.00         9.00  46.00",
        "backward   blocks.2    5.00      10.00       2.00  2.00     4.00   4.00             6.00       10.00         9.00  52.00",
        "backward   blocks.1    5.00      10.00       3.00  2.00     4.00   4.00             6.00       10.00         9.00  53.00",
        "backward   blocks.0    5.00      10.00       4.00  2.00     4.00   0.00             6.00       10.00         1.00  42.00",
        "backward   root        5.00      10.00       5.00  2.00     0.00   0.00             2.00       10.00         1.00  35.00",
        "optimizer  step        5.00      10.00       5.00  0.00     0.00   0.00             0.00        0.00         0.00  20.00",
    ]  # fmt: skip


@pytest.mark.once
@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_no_moment_has_more_than_the_plan_and_one_has_as_much(num_ahead: int) -> None:
    blocks = [unit("a"), unit("b", stays_whole=True, kept_whole=1), unit("c", is_offloaded=True), unit("d")]
    for units in (PLAN.units, (PLAN.units[0], *blocks), tuple(blocks), PLAN.units[:1], tuple(blocks[:1])):
        plan = MemoryPlan(units, num_ahead)
        moments = moments_of(plan, activations=0, optimizer_state=0)
        whole = [sum(m.nbytes[layer] for layer in ("root", "running", "ahead")) for m in moments]
        assert max(whole) == plan.gathered
        assert max(m.nbytes["reductions"] for m in moments) == plan.reductions
        assert (
            max(m.nbytes["gradients"] for m in moments) == moments[-1].nbytes["gradients"] == plan.gradients
        )
        assert {m.nbytes["shards"] for m in moments} == {plan.shards}
        assert max(m.total for m in moments) <= plan.peak


@pytest.mark.once
def test_pieces_of_small_worlds_are_kept_until_their_units_are_gathered_for_backward() -> None:
    plan = MemoryPlan((unit(""), *(unit(name, kept_piece=2) for name in "abc")))
    moments = moments_of(plan, activations=0, optimizer_state=0)
    kept = [(m.nbytes["root"] - 4 * MEBI) // MEBI for m in moments[:-1]]
    # forward: the root, a, b, c, the root; backward: the root with c ahead, c with b, b with a, a, the root.
    assert kept == [0, 0, 2, 4, 6, 4, 2, 0, 0, 0]
    whole = [sum(m.nbytes[layer] for layer in ("root", "running", "ahead")) for m in moments]
    assert max(whole) <= plan.gathered


@distributed(world_size=2)
def test_what_is_gathered_while_a_unit_runs_is_what_the_picture_says(world: World) -> None:
    platform, maker = world.platform, Maker(world)
    order: list[tuple[str, str]] = []
    gathered: list[int] = []

    def setup(module: Any) -> None:
        # Of different sizes, so that it shows which units are there.
        module.blocks = platform.ModuleList([maker.block(16, hidden) for hidden in (16, 64, 32, 48)])
        module.head = maker.linear(3, 16)

    def forward(module: Any, x: Any, rank: int) -> Any:
        for block in module.blocks:
            x = block(x)
        return module.head(x)

    model, mesh = maker.model(setup, forward), make_mesh(world)
    for at, block in enumerate(model.blocks):
        fully_shard(block, mesh, reshard_after_forward=at != 2)
    fully_shard(model, mesh)
    plan = memory_plan(model)
    units = {
        each.name: unit_of(model if each.name == "" else model.blocks[int(each.name[-1])])
        for each in plan.units
    }

    def look(phase: str, name: str) -> None:
        order.append((phase, name))
        gathered.append(
            sum(each.whole for each in plan.units if units[each.name].state is not ShardState.SHARDED)
        )

    def watch(name: str, block: Any) -> None:
        def before(module: Any, args: Any, kwargs: Any) -> None:
            look("forward", name)

        def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            platform.register_tensor_hook(output, lambda _: look("backward", name))

        platform.register_forward_pre_hook(block, before)
        platform.register_forward_hook(block, after)

    for at, block in enumerate(model.blocks):
        watch(f"blocks.{at}", block)
    for _ in range(3):
        order.clear()
        gathered.clear()
        platform.backward([loss_of(platform, model(maker.parameter(3, 16)))])
    moments = [m for m in moments_of(plan, activations=0, optimizer_state=0) if m.unit]
    assert order == [(m.phase, m.unit) for m in moments]
    assert gathered == [sum(m.nbytes[layer] for layer in ("root", "running", "ahead")) for m in moments]


@distributed(world_size=2)
def test_large_layers_of_the_root_stay_whole_with_it_in_plans_before_and_after_the_first_step(
    world: World,
) -> None:
    program = PROGRAMS["mlp"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MIN_NBYTES", 1)
        # A part needs a root that keeps something.
        maker = Maker(world)
        model = program.build(maker)
        model.scale = maker.parameter(1)
        program.shard(model, make_mesh(world))
        before = memory_plan(model)
        loss = loss_of(world.platform, model(program.inputs(maker, world.rank, 0)) * 1.0)
        world.platform.backward([loss])
    after = memory_plan(model)
    has_parts = world.platform.supports("stand_ins", world.device)
    assert [each.name for each in after.units if each.stays_whole] == (["", "head"] if has_parts else [""])
    assert (before.shards, before.gathered) == (after.shards, after.gathered)
    assert max(m.total for m in moments_of(after, activations=0, optimizer_state=0)) <= after.peak


@pytest.mark.once
def test_the_drawing_is_the_same_every_time_and_stacks_every_byte(tmp_path: Path) -> None:
    files = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in files:
        show_memory(PLAN, activations=MEBI, optimizer_state=10 * MEBI, path=path)
    assert files[0].read_bytes() == files[1].read_bytes()
    drawing = ElementTree.parse(files[0]).getroot()
    texts = [each.text for each in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"forward", "backward", "optimizer", "blocks.3", *LAYERS.values()} <= set(texts)
    moments = moments_of(PLAN, activations=MEBI, optimizer_state=10 * MEBI)
    highest = max(m.total for m in moments)
    assert f"{highest / MEBI:.0f}" in texts
    columns: dict[str, float] = {}
    for rect in drawing.iter("{http://www.w3.org/2000/svg}rect"):
        if len(rect):
            columns[rect.attrib["x"]] = columns.get(rect.attrib["x"], 0.0) + float(rect.attrib["height"])
    scale = max(columns.values()) / highest
    assert list(columns.values()) == pytest.approx([m.total * scale for m in moments], abs=1.0)


@pytest.mark.once
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"activations": {"block.1": 5}},
            r"activations are given for \['block\.1'\], and the units of the plan are",
        ),
        ({"activations": -1}, r"activations and optimizer_state are bytes, at least 0, got -1"),
        ({"activations": {"": -2}}, r"at least 0, got -2"),
        ({"optimizer_state": -3}, r"at least 0, got -3"),
        ({"path": "memory.png"}, r"a file with suffix \.svg, got 'memory\.png'"),
    ],
)
def test_a_wrong_call_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        show_memory(PLAN, **given)
