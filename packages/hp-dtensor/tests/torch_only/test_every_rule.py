"""No rule is without a case for the rule checker."""

import importlib
import sys
from pathlib import Path

import pytest

from hp_dtensor.rules import RULES
from hp_platform.testing import World, distributed

HERE = Path(__file__).parent
RANDOM = ("hp_dtensor.rules.random", "hp_dtensor.rules.random_composed")

ELSEWHERE = {
    # Needs a framework's dtype; is view with another tensor's shape: both are in test_dispatch.
    "cast",
    "view_as",
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
    random = {name for name, rule in RULES.items() if rule.plan.__module__ in RANDOM}
    missing = set(RULES) - checked - ELSEWHERE - random
    assert not missing, f"rules without a case: {', '.join(sorted(missing))}"
