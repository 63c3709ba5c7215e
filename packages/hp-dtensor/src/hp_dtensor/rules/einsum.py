"""einsum: contractions written as an equation. Its letters are the labels."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from hp_dtensor.rules.contraction import of_nothing
from hp_dtensor.rules.elementwise import broadcast_shape
from hp_dtensor.rules.labels import Labelled, Labels, Operand, contracts_nothing, labelled
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.spec import Spec

_DOTS = "..."
_LETTERS = string.ascii_uppercase + string.ascii_lowercase


def _one_form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``einsum("ij,jk", [a, b])`` and ``einsum(a, [0, 1], b, [1, 2], [0, 2])`` as ``einsum("ij,jk", a, b)``."""
    if not args:
        raise ValueError("einsum needs an equation and its operands")
    if isinstance(args[0], str):
        operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
        return (args[0].replace(" ", ""), *operands), kwargs
    pairs = len(args) // 2
    written = [_letters(numbers) for numbers in args[1 : 2 * pairs : 2]]
    output = f"->{_letters(args[-1])}" if len(args) % 2 else ""
    return (",".join(written) + output, *args[0 : 2 * pairs : 2]), kwargs


def _letters(numbers: Any) -> str:
    if not isinstance(numbers, (list, tuple)):
        raise ValueError(
            f"einsum takes an equation first, or operands each followed by a list of its dims; got {numbers!r}"
        )
    return "".join(_DOTS if n is Ellipsis else _LETTERS[n] for n in numbers)


@rule("einsum", params=("equation",), normalise=_one_form)
def einsum(equation: str, *operands: Any) -> Outcome:
    """``einsum("...ij,jk->...ik", a, b)``: any number of operands, repeated letters, ellipses, implicit output."""
    if not operands or not all(isinstance(x, Spec) for x in operands):
        raise ValueError(f"einsum({equation!r}) needs tensors for its operands")
    named = labels_of_operands(equation, [len(x.shape) for x in operands])
    sizes: dict[str, int] = {}
    for labels, x in zip(named, operands, strict=True):
        for label, size in zip(labels, x.shape, strict=True):
            known = sizes.setdefault(label, size)
            sizes[label] = broadcast_shape([(known,), (size,)])[0]
    output = output_labels(equation, named)
    diagonal = {label for labels in named for label in labels if labels.count(label) > 1}

    def cuttable(labels: Labels, shape: Sequence[int]) -> Labels:
        return tuple(
            "" if label in diagonal or size != sizes[label] else label
            for label, size in zip(labels, shape, strict=True)
        )

    shape = tuple(sizes[label] for label in output)
    factors = [
        Operand(i + 1, x, cuttable(labels, x.shape))
        for i, (x, labels) in enumerate(zip(operands, named, strict=True))
    ]
    results = [Labelled(cuttable(output, shape), shape)]
    found = labelled(factors, results)
    return of_nothing(found, factors) if contracts_nothing(factors, results, found) else found


def labels_of_operands(equation: str, ndims: Sequence[int]) -> list[Labels]:
    """The labels of the dims of operands with these numbers of dims. ValueError where they do not fit the equation."""
    terms = _terms(equation)
    if len(terms) != len(ndims):
        raise ValueError(f"einsum({equation!r}) names {len(terms)} operands, got {len(ndims)}")
    return [_labels(term, ndim, equation) for term, ndim in zip(terms, ndims, strict=True)]


def output_labels(equation: str, named: Sequence[Labels]) -> Labels:
    """The labels of the result, of an equation and the labels of its operands."""
    _, arrow, right = equation.partition("->")
    return _output(named, _terms(equation), right if arrow else None, equation)


def _terms(equation: str) -> list[str]:
    return equation.partition("->")[0].split(",")


def _labels(term: str, ndim: int, equation: str) -> Labels:
    """A term's labels; the dims of an ellipsis are counted from its last one on."""
    before, dots, after = term.partition(_DOTS)
    count = ndim - len(before) - len(after)
    if count < 0 or (count and not dots):
        raise ValueError(f"einsum({equation!r}): the term {term!r} does not fit a tensor with {ndim} dims")
    return (*before, *(f"{_DOTS}{i}" for i in reversed(range(count))), *after)


def _output(named: Sequence[Labels], terms: Sequence[str], written: str | None, equation: str) -> Labels:
    dotted = {label for labels in named for label in labels if label.startswith(_DOTS)}
    of_dots = tuple(f"{_DOTS}{i}" for i in reversed(range(len(dotted))))
    if written is None:
        # Letters that stand once, in alphabetical order, after the dims of the ellipsis.
        text = "".join(terms).replace(_DOTS, "")
        return (*of_dots, *sorted(letter for letter in set(text) if text.count(letter) == 1))
    before, dots, after = written.partition(_DOTS)
    output = (*before, *(of_dots if dots else ()), *after)
    known = {label for labels in named for label in labels}
    if not set(output) <= known or len(set(output)) != len(output):
        raise ValueError(
            f"einsum({equation!r}): each letter of the output stands in an operand, and once in the output"
        )
    return output
