"""The packages as installed together: versions within the bounds that siblings set, names that lead to them, one command."""

import subprocess
import sys
from importlib import import_module
from importlib.metadata import distribution, entry_points, version

import pytest
from packaging.requirements import Requirement

DISTRIBUTIONS = (
    "hp-platform",
    "hp-dtensor",
    "hp-fsdp",
    "hp-tp",
    "hp-moe",
    "hp-pipeline",
    "hp-optim",
    "hp-recompute",
    "hyper-parallel",
)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_every_sibling_is_within_the_declared_bounds(name: str) -> None:
    needs = [Requirement(text) for text in distribution(name).requires or []]
    siblings = [need for need in needs if need.name in DISTRIBUTIONS and need.marker is None]
    assert siblings or name == "hp-platform"
    for need in siblings:
        assert need.specifier.contains(version(need.name)), (
            f"{name} needs {need}, {version(need.name)} is installed"
        )


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_distribution_is_imported_by_its_name_with_underscores(name: str) -> None:
    assert import_module(name.replace("-", "_")).__version__ == version(name)


def test_all_packages_in_one_process_import_no_framework() -> None:
    modules = ", ".join(name.replace("-", "_") for name in DISTRIBUTIONS)
    script = f"import sys, {modules}; print(sorted({{'torch', 'torch_npu', 'mindspore'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_command_is_installed() -> None:
    (command,) = entry_points(group="console_scripts", name="hyper-parallel")
    assert callable(command.load())
