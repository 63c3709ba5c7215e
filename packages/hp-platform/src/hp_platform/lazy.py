"""Packages whose names load at first use, so that importing them costs nothing and imports no framework (PEP 562).

A package lists its public names twice: under ``TYPE_CHECKING`` as ordinary imports, for type checkers and readers, and in
the table given to :func:`attach`, for Python.
:func:`hp_platform.testing.assert_exports` holds that both lists are equal.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def attach(
    package: str, where: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` for ``package``.

    ``where`` maps each public name to the module (relative to the package, or absolute in another package) that defines it;
    a name mapped to ``"."`` is itself a sub-module.
    """

    def load(name: str) -> object:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if where[name] == ".":
            return importlib.import_module(f"{package}.{name}")
        place = where[name]
        module = importlib.import_module(place if place.startswith("hp_") else f"{package}.{place}")
        return getattr(module, name)

    names = sorted([*where, "__version__"])
    return load, lambda: names, names
