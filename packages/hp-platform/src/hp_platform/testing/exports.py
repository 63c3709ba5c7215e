"""What a package promises by its ``__init__``: names that load, that explain themselves, and that type checkers see too."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType


def assert_exports(package: ModuleType) -> None:
    """Check a package whose names load at first use (:mod:`hp_platform.lazy`).

    Every name of ``__all__`` loads, has a docstring (constants excepted) and is listed by ``dir``; and the names imported under
    ``TYPE_CHECKING`` are the same. AssertionError naming the first that is not so. Imports the framework in use.
    """
    assert package.__file__ is not None
    tree = ast.parse(Path(package.__file__).read_text())
    guarded = [
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imports = [node for block in guarded for node in ast.walk(block) if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname or alias.name for node in imports for alias in node.names}
    public = set(package.__all__) - {"__version__"}
    assert seen == public, (
        f"{package.__name__}: under TYPE_CHECKING only {sorted(seen - public)}, in __all__ only {sorted(public - seen)}"
    )
    for name in sorted(public):
        value = getattr(package, name)
        assert isinstance(value, (dict, tuple, str)) or value.__doc__, (
            f"{package.__name__}.{name} has no docstring"
        )
    assert set(package.__all__) <= set(dir(package)), f"dir({package.__name__}) leaves out public names"
