"""The arrows between packages hold for tests too.

import-linter sees the packages, not their tests: a package's tests may import the package, the siblings that its
pyproject.toml declares, and `hp_platform.testing`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli

from lint.violation import Violation


def check(root: Path) -> Iterator[Violation]:
    """All imports in `packages/*/tests` that no arrow allows."""
    house = {_module(project.parent.name) for project in root.glob("packages/*/pyproject.toml")}
    for project in sorted(root.glob("packages/*/pyproject.toml")):
        allowed = {_module(project.parent.name), *declared(project)}
        for test in sorted(project.parent.glob("tests/**/*.py")):
            for line, module in imports(test):
                package = module.split(".")[0]
                testing = module == "hp_platform.testing" or module.startswith("hp_platform.testing.")
                if package in house - allowed and not testing:
                    yield Violation(
                        test,
                        line,
                        "test-arrows",
                        f"a test of {project.parent.name} imports {module}",
                        f"its arrows lead to {', '.join(sorted(allowed))} and hp_platform.testing",
                        "move a test that needs more packages to integration_tests/",
                    )


def declared(project: Path) -> set[str]:
    """The modules of everything that a pyproject.toml declares at run time."""
    content: dict[str, Any] = tomli.loads(project.read_text(encoding="utf-8"))
    return {_module(re.split(r"[^\w.-]", need)[0]) for need in content["project"].get("dependencies", ())}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import in a file, `importorskip` and `import_module` included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                # `from hp_platform import testing` imports hp_platform.testing.
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Name(id="importorskip" | "import_module")
                | ast.Attribute(attr="importorskip" | "import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield node.lineno, module


def _module(distribution: str) -> str:
    return distribution.replace("-", "_")
