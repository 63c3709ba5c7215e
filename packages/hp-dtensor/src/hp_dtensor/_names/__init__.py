"""Which functions of the frameworks follow which rule, by name, in one file per family. The adapters look the names up.

FUNCTIONS: methods of both frameworks' tensors; on torch also functions of torch, torch.nn.functional and torch.special, or
by a dotted name below torch (``linalg.vector_norm``). One operation has several identities (``x ** 2`` is neither
Tensor.pow nor torch.pow), so every spelling stands here.
IN_PLACE: methods that write into their tensor, for rules that know nothing of that; ``add_`` and ``__iadd__`` do what ``add``
does.
METHODS: methods of MindSpore's tensors that take other arguments, or mean something else, than the function of torch by that
name; there they come before FUNCTIONS.
PRIMITIVES: what MindSpore's functions and operators end in.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from hp_dtensor._names import (
    along,
    attention,
    convolution,
    elementwise,
    fourier,
    index,
    linalg,
    loss,
    matmul,
    normalization,
    random,
    reduction,
    shape,
)

_FAMILIES = (
    along,
    attention,
    convolution,
    elementwise,
    fourier,
    index,
    linalg,
    loss,
    matmul,
    normalization,
    random,
    reduction,
    shape,
)


def functions() -> Iterator[tuple[str, str]]:
    """Pairs of a rule and the name of a function."""
    yield from _pairs("FUNCTIONS")


def in_place() -> Iterator[tuple[str, str]]:
    """Pairs of a rule and the name of a method that writes into its tensor."""
    yield from _pairs("IN_PLACE")


def methods() -> Iterator[tuple[str, str]]:
    """Pairs of a rule and the name of a method of MindSpore that torch's function by that name does not describe."""
    yield from _pairs("METHODS")


def primitives() -> Iterator[tuple[str, str]]:
    """Pairs of a rule and the name of a primitive of MindSpore."""
    yield from _pairs("PRIMITIVES")


def functional_name(name: str) -> str:
    """``add`` of ``add_`` and ``__add__`` of ``__iadd__``."""
    return f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")


def _pairs(table: str) -> Iterator[tuple[str, str]]:
    for family in _FAMILIES:
        for rule, names in getattr(family, table, {}).items():
            for name in names.split():
                yield rule, name


def params(name: str) -> tuple[str | tuple[str, None], ...] | None:
    """The names of a function's arguments by position, where they are not those of its rule."""
    for family in _FAMILIES:
        given = getattr(family, "PARAMS", {}).get(name)
        if given is not None:
            rest = ((n[:-1], None) if n.endswith("=") else n for n in given.split())
            return ("input", *rest)
    return None


def families() -> tuple[ModuleType, ...]:
    """The modules with the tables."""
    return _FAMILIES
