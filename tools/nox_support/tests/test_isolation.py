"""The isolation check refuses what it is there to refuse."""

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from nox_support import isolation


def needs(**requirements: str) -> dict[str, list[Requirement]]:
    return {
        name.replace("_", "-"): [Requirement(need) for need in text.split()]
        for name, text in requirements.items()
    }


REQUIRES = needs(
    hp_platform="numpy cloudpickle", hp_tp="hp-platform>=0.1", numpy="", cloudpickle="", torch=""
)


def test_the_declared_closure_passes() -> None:
    isolation.verify_installed("hp-tp", {"hp-tp", "hp-platform", "numpy", "cloudpickle"}, REQUIRES)


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        (
            {"hp-tp", "hp-platform", "numpy", "cloudpickle", "torch"},
            "pulls in torch; a framework belongs in an extra",
        ),
        ({"hp-tp", "hp-platform", "numpy", "cloudpickle", "rich"}, r"installed but not declared: \['rich'\]"),
        ({"hp-tp", "hp-platform", "numpy"}, r"declared but not installed: \['cloudpickle'\]"),
    ],
)
def test_anything_else_is_refused(installed: set[str], message: str) -> None:
    with pytest.raises(isolation.IsolationError, match=message):
        isolation.verify_installed("hp-tp", installed, REQUIRES)


def test_a_meta_package_that_leaves_a_sibling_out_is_refused() -> None:
    requires = {**REQUIRES, **needs(hyper_parallel="hp-tp")}
    with pytest.raises(isolation.IsolationError, match="does not pull in hp-dtensor, hp-fsdp, hp-moe"):
        isolation.verify_installed("hyper-parallel", isolation.closure("hyper-parallel", requires), requires)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import time; time.sleep(0.15); __version__ = '1'", "import takes 1.. ms, the limit is 100 ms"),
        ("import framework_that_is_absent", "import slow failed without a framework"),
        ("import sys; sys.modules['torch'] = sys; __version__ = '1'", "a framework was imported"),
    ],
)
def test_a_slow_or_greedy_import_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    (tmp_path / "slow.py").write_text(source)
    monkeypatch.setattr(isolation, "FOLDER", tmp_path)
    monkeypatch.setattr(isolation, "IMPORT_RUNS", 2)
    with pytest.raises(isolation.IsolationError, match=message):
        isolation.import_time(Path(sys.executable), "slow")
