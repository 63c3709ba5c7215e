"""The packages' metadata agree with the design and with each other."""

import re
from pathlib import Path
from typing import Any

import pytest
import tomli

from nox_support.house import PACKAGES, ROOT, module_name

# The arrows of the house, as the design draws them.
ARROWS = {
    "hp-platform": set(),
    "hp-dtensor": {"hp-platform"},
    "hp-fsdp": {"hp-platform", "hp-dtensor"},
    "hp-tp": {"hp-platform", "hp-dtensor"},
    "hp-moe": {"hp-platform", "hp-dtensor"},
    "hp-pipeline": {"hp-platform", "hp-dtensor"},
    "hp-optim": {"hp-platform", "hp-dtensor"},
    "hp-recompute": {"hp-platform"},
    "hyper-parallel": set(PACKAGES) - {"hyper-parallel"},
}
FRAMEWORK_EXTRAS = ("torch", "npu", "mindspore")

pytestmark = pytest.mark.parametrize("package", PACKAGES)


def project(package: str) -> dict[str, Any]:
    content = tomli.loads((ROOT / "packages" / package / "pyproject.toml").read_text())
    return dict(content["project"])


def siblings(needs: list[str]) -> dict[str, str]:
    """Name (with extra) and bounds of the needs that are packages of this house."""
    split = [re.fullmatch(r"([\w-]+(?:\[\w+\])?)(.*)", need) for need in needs]
    return {m[1]: m[2] for m in split if m is not None and m[1].split("[")[0] in PACKAGES}


def test_declares_exactly_its_arrows_with_floor_and_ceiling(package: str) -> None:
    declared = siblings(project(package)["dependencies"])
    assert set(declared) == ARROWS[package]
    for sibling, bounds in declared.items():
        assert re.fullmatch(r">=\d+\.\d+,<\d+\.\d+", bounds), f"{sibling}{bounds} needs a floor and a ceiling"


@pytest.mark.parametrize("extra", FRAMEWORK_EXTRAS)
def test_extras_travel_along_the_arrows(package: str, extra: str) -> None:
    bounds = siblings(project(package)["dependencies"])
    assert siblings(project(package)["optional-dependencies"][extra]) == {
        f"{sibling}[{extra}]": bounds[sibling] for sibling in ARROWS[package]
    }


def test_is_typed_licensed_and_versioned_in_one_place(package: str) -> None:
    folder: Path = ROOT / "packages" / package
    source = folder / "src" / module_name(package)
    assert (source / "py.typed").exists()
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert "version" in project(package)["dynamic"]
    assert re.search(r'^__version__ = "\d+\.\d+\.\d+"$', (source / "__about__.py").read_text(), re.MULTILINE)
    assert project(package)["requires-python"] == ">=3.10,<3.13"


def test_has_a_readme_a_changelog_and_tests(package: str) -> None:
    folder = ROOT / "packages" / package
    assert (folder / "README.md").read_text().startswith(f"# {package}\n")
    assert "## [Unreleased]" in (folder / "CHANGELOG.md").read_text()
    assert list(folder.glob("tests/**/test_*.py")), f"{package} has no test"
