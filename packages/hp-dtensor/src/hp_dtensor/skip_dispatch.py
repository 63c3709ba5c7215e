"""``SkipDTensorDispatch``: a block in which operations run on this rank's local tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

from hp_dtensor.dtensor import DTensorMethods
from hp_dtensor.errors import name_of
from hp_dtensor.nest import map_leaves
from hp_platform import _process


class SkipDTensorDispatch:
    """Inside of the block an operation that meets DTensors runs on their local tensors, and its result is plain.

    For code that works on pieces as well as on the whole, such as an elementwise optimizer's step. Nothing is redistributed
    or reduced, and a gradient that is recorded inside is this rank's own: what a rank computes from a Replicate it must
    compute on all ranks alike. What DTensors tell of themselves (``shape``, ``grad``, ``item()``, ``backward()`` ...) stays
    as it is outside.

    Blocks may be nested, the innermost counts; it holds for this thread and asynchronous task only. One object may be entered
    many times.

    Args:
        no_skip: operations that are dispatched as outside, as functions or names: ``{"add", torch.matmul}``. A name counts
            for every spelling of the operation (``x + y``, ``x.add(y)``, ``x.add_(y)``), if it is the name of its rule.

    TypeError if ``no_skip`` is no collection of functions and names. Communication: none.
    """

    def __init__(self, no_skip: Iterable[Any] | None = None) -> None:
        given = () if no_skip is None else no_skip
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise TypeError(f"no_skip takes a set of functions and names of operations, got {no_skip!r}")
        names = []
        for op in given:
            name = op if isinstance(op, str) else getattr(op, "__name__", getattr(op, "name", None))
            if not isinstance(name, str):
                raise TypeError(f"no_skip takes functions and names of operations, got {op!r}")
            names.append(name)
        self._no_skip = frozenset(names)

    def __enter__(self) -> None:
        _process.skip_stack.set((*_process.skip_stack.get(), self._no_skip))
        _process.open_modes.add(1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _process.open_modes.add(-1)
        _process.skip_stack.set(_process.skip_stack.get()[:-1])


def is_skipped(function: Any, rule_name: str | None = None) -> bool:
    """Whether ``function`` shall run on local tensors here. Asked only while a block is open somewhere in the process."""
    stack = _process.skip_stack.get()
    if not stack:
        return False
    no_skip = stack[-1]
    return not no_skip or not (
        rule_name in no_skip
        or name_of(function) in no_skip
        or getattr(function, "__name__", getattr(function, "name", None)) in no_skip
    )


def on_locals(function: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """``function`` with the local tensors of DTensors, also of those in lists and dicts."""
    given = [map_leaves(_local, arg) for arg in args]
    return function(*given, **{name: map_leaves(_local, value) for name, value in (kwargs or {}).items()})


def _local(x: Any) -> Any:
    return x._local if isinstance(x, DTensorMethods) else x
