"""How functions and values travel between processes: cloudpickle, so that those of scripts and notebooks do too."""

from __future__ import annotations

import functools
import importlib.machinery
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any, ClassVar


def dumps(value: Any) -> bytes:
    """Pickle; a function or class that a new process could not import travels by value, with the globals that it uses."""
    import cloudpickle

    module = _home(value)
    if module is None or _importable(module):
        return _pickle(value)
    cloudpickle.register_pickle_by_value(module)
    try:
        return _pickle(value)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def loads(payload: bytes) -> Any:
    """The inverse of :func:`dumps`."""
    return pickle.loads(payload)


def _pickle(value: Any) -> bytes:
    import cloudpickle

    reduce_code = cloudpickle.Pickler.dispatch_table[CodeType]

    # cloudpickle forgets which file a function comes from; tracebacks shall show its lines.
    with_filename = {CodeType: functools.partial(_reduce_code, reduce_code)}

    class Pickler(cloudpickle.Pickler):
        dispatch_table: ClassVar[Any] = ChainMap(with_filename, cloudpickle.Pickler.dispatch_table)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _reduce_code(reduce_code: Callable[[CodeType], Any], code: CodeType) -> tuple[Any, ...]:
    make, args = reduce_code(code)[:2]
    return _make_code, (make, args, code.co_filename)


def _make_code(make: Callable[..., CodeType], args: tuple[Any, ...], filename: str) -> CodeType:
    return make(*args).replace(co_filename=filename)


def _home(value: Any) -> ModuleType | None:
    """The module that defines the function of a call ``(function, args, kwargs)``, unless cloudpickle handles it by itself."""
    function = value[0] if isinstance(value, tuple) and value else value
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__module__", None)
    return None if name in (None, "__main__") else sys.modules.get(name)


def _importable(module: ModuleType) -> bool:
    """Whether a fresh process with our ``sys.path`` finds the same module under its name.

    ``importlib.util.find_spec`` would answer yes for whatever is loaded already, such as a file that a test runner has
    imported under a name of its own.
    """
    spec: importlib.machinery.ModuleSpec | None = None
    path: Any = None
    parts = module.__name__.split(".")
    for depth in range(len(parts)):
        spec = _find(".".join(parts[: depth + 1]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
        if path is None and depth + 1 < len(parts):
            return False
    file = getattr(module, "__file__", None)
    return spec is not None and (file is None or spec.origin == file)


def _find(name: str, path: Any) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, path) if find is not None else None
        if spec is not None:
            return spec
    return None
