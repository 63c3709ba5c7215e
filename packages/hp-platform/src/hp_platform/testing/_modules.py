"""How a worker gets at a test function: its file is imported under the name that it has in the pytest process.

pytest's ``importlib`` mode gives files names of their own, so test files of the same name in several folders do not meet. A
plain import would find none of them. Assertions are rewritten as pytest does it, so that they show values; pytest offers no
public way to that outside of its own run, so this file uses ``_pytest.assertion.rewrite.rewrite_asserts``.
"""

from __future__ import annotations

import ast
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from types import CodeType, ModuleType
from typing import Any


class _RewritingLoader(SourceFileLoader):
    """Loads a file with its assertions rewritten; nothing is cached on disk."""

    def get_code(self, fullname: str) -> CodeType:
        from _pytest.assertion.rewrite import rewrite_asserts

        path = self.get_filename(fullname)
        source = self.get_data(path)
        tree = ast.parse(source, filename=path)
        rewrite_asserts(tree, source, path)
        code: CodeType = compile(tree, path, "exec", dont_inherit=True)
        return code


def test_module(path: str, name: str) -> ModuleType:
    """The module of the file; imported at the first request, the same object ever after."""
    found = sys.modules.get(name)
    if found is not None and getattr(found, "__file__", None) == path:
        return found
    spec = spec_from_file_location(name, path, loader=_RewritingLoader(name, path))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def resolve(module: ModuleType, qualified_name: str) -> Any:
    """The function; a method comes bound to a new instance of its class."""
    *classes, function = qualified_name.split(".")
    owner: Any = module
    for name in classes:
        owner = getattr(owner, name)
    return getattr(owner() if classes else owner, function)
