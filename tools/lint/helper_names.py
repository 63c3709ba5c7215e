"""No two modules that tests share have one name.

Test files find their helpers through `sys.path`, and one run may take several folders: the first module of a name is then
everybody's. (Test files themselves are not found by name: pytest's `importlib` mode tells them apart by their paths.)
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from lint.violation import Violation

PLACES = ("packages/*/tests", "integration_tests", "tools/*/tests")
LOADED_BY_PYTEST = frozenset({"__init__", "conftest"})


def check(root: Path) -> Iterator[Violation]:
    """Helpers of tests with the name of another one, or of a module of Python's own."""
    first: dict[str, Path] = {}
    for path in helpers(root):
        taken = first.setdefault(path.stem, path)
        if taken is not path:
            what = f"the name {path.stem!r} is that of {taken.relative_to(root)} too"
        elif path.stem in sys.stdlib_module_names:
            what = f"the name {path.stem!r} is that of a module of Python's own"
        else:
            continue
        yield Violation(
            path,
            0,
            "helper-name",
            what,
            "tests of several folders that run together get whichever is imported first",
            "name it after what it holds for this package",
        )


def helpers(root: Path) -> Iterator[Path]:
    """Modules in the folders of tests that are no tests, and of which their names are all that tests know."""
    for place in PLACES:
        for folder in sorted(root.glob(place)):
            for path in sorted(folder.rglob("*.py")):
                if path.stem not in LOADED_BY_PYTEST and not path.stem.startswith("test_"):
                    yield path
