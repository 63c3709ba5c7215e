"""More cases for the full run, so that every rule meets every size that the run is about."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rule_cases import IS_FULL, SIZES, Case, Cases, T, filled, tensors_of

from hp_dtensor.whole_call import gradients, leaf, results_of, seed, with_tensors
from hp_dtensor.whole_call import tensors_of as plain_tensors

UNCHECKED = ("ctc_loss",)
"""Rules of operations that read beyond their tensors where sizes do not fit their other arguments."""


def add_resized(cases: Cases, made: Callable[[Any], Any] = lambda function: function) -> None:
    """In the full run: for each rule and each of SIZES that no tensor of its cases has, a case in which one has.

    It is the first case of the rule, those of few tensors first, that the operation accepts with a size replaced wherever it
    stands in the shapes. ``made`` makes of what stands as a case's function the function itself.
    """
    if not IS_FULL:
        return
    found: Cases = {}
    for rule in dict.fromkeys(given.rule for given in cases.values() if given.rule not in UNCHECKED):
        own = {name: given for name, given in cases.items() if given.rule == rule}
        met = {n for given in own.values() for x in tensors_of(given.args) for n in x.shape}
        for size in SIZES:
            if size not in met:
                found.update(next(_with(size, own, made), {}))
    cases.update(found)


def _with(size: int, own: Cases, made: Callable[[Any], Any]) -> Iterator[Cases]:
    for name, given in sorted(own.items(), key=lambda item: len(list(tensors_of(item[1].args)))):
        for old in sorted({n for x in tensors_of(given.args) for n in x.shape}, reverse=True):
            changed = replace(given, args=_resized(given.args, old, size))
            if _is_accepted(changed, made(given.function)):
                yield {f"{name} with {size} for {old}": changed}


def _resized(args: Sequence[Any], old: int, new: int) -> list[Any]:
    def changed(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(map(changed, x))
        return replace(x, shape=tuple(new if n == old else n for n in x.shape)) if isinstance(x, T) else x

    return [changed(x) for x in args]


def _is_accepted(given: Case, function: Callable[..., Any]) -> bool:
    """Whether the plain operation takes such tensors, and has gradients, without an error or a warning."""
    args = filled(given.args)
    leaves = [leaf(x) for x in plain_tensors(args)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            whole = results_of(function(*with_tensors(args, leaves), **given.kwargs))
            gradients(whole, leaves, [seed(x) for x in whole])
        except (
            ValueError,
            RuntimeError,
            IndexError,
            TypeError,
            AssertionError,
            NotImplementedError,
            Warning,
        ):
            return False
    return True
