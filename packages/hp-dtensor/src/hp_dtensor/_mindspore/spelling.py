"""Operations that MindSpore's primitives spell otherwise than rules do.

A primitive has an order of arguments of its own, numbers for words, attributes on an object, and results beside the one that
counts. A spelling reads such a call and gives it to a rule, or writes the operation by others on DTensors. What then runs on
local tensors takes the arguments that the rule's functions take.

[Note: kernels on cpu] About a third of MindSpore's primitives has no kernel on cpu, and some round float64 to float32 there.
A plain tensor gets an error at the first read of the result, or the rounded values. A DTensor gets the operation composed of
what works (:mod:`hp_dtensor._mindspore.composed`), so that a program for Ascend can be tried on cpu.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mindspore

from hp_dtensor.dispatch import Dispatch
from hp_dtensor.rules import RULES
from hp_dtensor.skip_dispatch import is_skipped, on_locals
from hp_platform import _process, get_platform


@dataclass(frozen=True)
class Operation:
    """A primitive that met DTensors."""

    name: str
    native: Callable[..., Any]
    """It, on local tensors, with the arguments of MindSpore."""
    attributes: Any
    """The object with its attributes, if the primitive is one."""
    dispatch: Dispatch

    def follow(self, rule: str, local: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What rule ``rule`` makes of the call; ``local`` runs on local tensors with the arguments as the rule has them."""
        return self.dispatch(RULES[rule], _Named(local, self.name), args, kwargs)

    def native_or(self, composed: Callable[..., Any]) -> Callable[..., Any]:
        """The primitive, but ``composed`` on cpu. Both take the arguments of MindSpore. See [Note: kernels on cpu]."""
        return lambda x, *rest: (composed if is_on_cpu(x) else self.native)(x, *rest)


class _Named:
    """A function under the name that messages show."""

    __slots__ = ("_run", "name")

    def __init__(self, run: Callable[..., Any], name: str) -> None:
        self._run, self.name = run, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


@dataclass(frozen=True)
class Spelling:
    """How one primitive is read."""

    rule: str
    """By which ``SkipDTensorDispatch(no_skip=...)`` knows the operation."""
    read: Callable[..., Any]
    """``read(operation, *args, **kwargs)`` gives the result."""

    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, dispatch: Any
    ) -> Any:
        """The result of a primitive, as ``__fallback__`` gets it."""
        if _process.open_modes.count and is_skipped(func, self.rule):
            return on_locals(func, args, kwargs)
        primitive, native = None, func
        if args and isinstance(args[0], mindspore.ops.Primitive):
            # A primitive that is an object comes with itself, its name and its arguments.
            primitive, name, args = args
            native = lambda *local: func(primitive, name, local)  # noqa: E731
        return self.read(Operation(func.name, native, primitive, dispatch), *args, **(kwargs or {}))


SPELLINGS: dict[str, Spelling] = {}
"""Name of a primitive -> how it is read. Filled when the modules of :mod:`hp_dtensor._mindspore.spellings` are imported."""


def spelling(rule: str, *names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: the function reads the primitives of these names."""

    def enter(read: Callable[..., Any]) -> Callable[..., Any]:
        SPELLINGS.update(dict.fromkeys(names, Spelling(rule, read)))
        return read

    return enter


def is_on_cpu(x: mindspore.Tensor) -> bool:
    """Where kernels are missing."""
    return get_platform().device_of(x).partition(":")[0] == "cpu"


def refuse_on_cpu(x: mindspore.Tensor, what: str, way_out: str) -> None:
    """NotImplementedError on cpu."""
    if is_on_cpu(x):
        raise NotImplementedError(f"mindspore {mindspore.__version__} on cpu: {what}; {way_out}")


REDUCTIONS = ("sum", "mean", "none")
"""The words behind MindSpore's numbers for what a loss does with its elements."""
