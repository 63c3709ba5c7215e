"""How functions and values travel between processes: cloudpickle, so that those of scripts and notebooks do too."""

from __future__ import annotations

import importlib.machinery
import pickle
import sys
from types import ModuleType
from typing import Any


def dumps(value: Any) -> bytes:
    """Pickle; a function or class that a new process could not import travels by value, with the globals that it uses."""
    import cloudpickle

    module = _home(value)
    if module is None or _importable(module.__name__):
        return bytes(cloudpickle.dumps(value))
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(value))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def loads(payload: bytes) -> Any:
    """The inverse of :func:`dumps`."""
    return pickle.loads(payload)


def _home(value: Any) -> ModuleType | None:
    """The module that defines the function of a call ``(function, args, kwargs)``, unless cloudpickle handles it by itself."""
    function = value[0] if isinstance(value, tuple) and value else value
    name = getattr(function, "__module__", None)
    return None if name in (None, "__main__") else sys.modules.get(name)


def _importable(name: str) -> bool:
    """Whether a fresh process with our ``sys.path`` finds the module.

    ``importlib.util.find_spec`` would answer yes for whatever is loaded already, such as a file that a test runner has
    imported under a name of its own.
    """
    path: Any = None
    parts = name.split(".")
    for depth in range(len(parts)):
        spec = _find(".".join(parts[: depth + 1]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
        if path is None and depth + 1 < len(parts):
            return False
    return True


def _find(name: str, path: Any) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, path) if find is not None else None
        if spec is not None:
            return spec  # type: ignore[no-any-return]
    return None
