"""No rule is without a case for the rule checker."""

import importlib
import itertools
import sys
from pathlib import Path

import pytest
import torch

from hp_dtensor.pieces import coordinates
from hp_dtensor.placements import Partial, Placement, Replicate, Shard
from hp_dtensor.rules import RULES
from hp_dtensor.rules_view import ask
from hp_dtensor.simulation import CheckerMesh, Replies
from hp_dtensor.spec import make_spec
from hp_platform.testing import World, distributed

HERE = Path(__file__).parent
RANDOM = ("hp_dtensor.rules.random", "hp_dtensor.rules.random_composed")

CONSTANT = {"zeros_like", "ones_like", "full_like"}
"""Rules of the same file that draw nothing."""
ELSEWHERE = {
    # Its values do not count: test_empty_memory_lies_as_the_tensor_did below.
    "empty_like",
    # In place, and of whole tensors only: test_view_scatter.py.
    "fill_diagonal_",
    "as_strided",
    # MindSpore's methods: mindspore_only/test_rules_of_reductions.py.
    *(f"{name}_by_axis" for name in ("max", "min", "var", "std", "aminmax")),
}


def _rule_of(entry: object) -> str:
    return entry[0] if isinstance(entry, tuple) else entry.rule  # type: ignore[attr-defined, no-any-return]


@pytest.mark.once
@distributed(world_size=1, backends="torch")
def test_every_rule_is_checked(world: World) -> None:
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    names = ["test_rules", *(path.stem for path in sorted(HERE.glob("test_rules_of_*.py")))]
    modules = [importlib.import_module(name) for name in names]
    tables = [getattr(module, table, {}) for module in modules for table in ("CASES", "VIEWS")]
    checked = {_rule_of(entry) for table in tables for entry in table.values()}
    # Each rank of the checker would take a place of its own in the stream: see tests/random.
    random = {name for name, rule in RULES.items() if rule.plan.__module__ in RANDOM} - CONSTANT
    # Other tests add rules of their own to this process.
    ours = {name for name, rule in RULES.items() if rule.plan.__module__.startswith("hp_dtensor.")}
    missing = ours - checked - ELSEWHERE - random
    assert not missing, f"rules without a case: {', '.join(sorted(missing))}"


@distributed(world_size=1, backends="torch")
def test_empty_memory_lies_as_the_tensor_did(world: World) -> None:
    choices: list[Placement] = [Shard(0), Shard(1), Replicate(), Partial(), Partial("max")]
    for mesh_shape, shape in itertools.product([(2,), (4,), (2, 2)], [(5, 3), (1, 2), (8, 1)]):
        for placements in itertools.product(choices, repeat=len(mesh_shape)):
            for coordinate in coordinates(mesh_shape):
                spec = make_spec(CheckerMesh(mesh_shape, coordinate, Replies()), placements, shape)
                outcome = ask(RULES["empty_like"], (spec,), {})
                expected = tuple(Replicate() if p.is_partial() else p for p in placements)
                assert (outcome.output, outcome.shape) == (expected, shape)
                assert outcome.run is not None
                made = outcome.run(torch.zeros(spec.local_shape, dtype=torch.float64))
                assert made.dtype == torch.float64
                assert tuple(made.shape) == make_spec(spec.mesh, expected, shape).local_shape
