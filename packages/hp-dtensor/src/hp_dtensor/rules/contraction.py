"""One product of labelled factors, summed over the labels that its result lacks: what every rule of products is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.no_elements import has_gradients
from hp_dtensor.rules.elementwise import broadcast_shape
from hp_dtensor.rules.labels import (
    Labelled,
    Labels,
    Operand,
    Role,
    aligned,
    contracts_nothing,
    labelled,
    local_shape,
    zeros_of_product,
)
from hp_dtensor.rules.registry import Outcome
from hp_dtensor.spec import Spec
from hp_platform import get_platform

Shape = tuple[int, ...]


def contraction(
    factors: Sequence[tuple[Spec, Labels]],
    output: Labels,
    shape: Shape,
    added: Spec | None = None,
    *,
    first: int = 0,
    added_at: int | None = None,
    evenly: Mapping[str, int] | None = None,
) -> Outcome:
    """The product of the factors, summed over the labels that ``output`` lacks, plus ``added``, which may stretch.

    The factors are the arguments from position ``first`` on; ``added_at`` is the position of what is added.
    """
    operands = [Operand(first + i, spec, labels) for i, (spec, labels) in enumerate(factors)]
    if added is not None:
        assert added_at is not None
        if broadcast_shape([added.shape, shape]) != shape:
            raise ValueError(
                f"what is added has shape {added.shape}, the product {shape}: it must stretch to that"
            )
        operands.append(Operand(added_at, added, aligned(added.shape, shape, output), Role.SUMMAND))
    results = [Labelled(output, shape)]
    found = labelled(operands, results, evenly=evenly)
    return of_nothing(found, operands) if contracts_nothing(operands, results, found) else found


def of_nothing(found: Outcome, operands: Sequence[Operand]) -> Outcome:
    """The outcome where this rank has nothing to contract: its summand is zero, plus what is added.

    Frameworks are not asked: see [Note: empty pieces] in hp_dtensor.no_elements.
    """
    assert found.output is not None
    shape = local_shape(operands[0].spec, found.output, found.shape)
    factors = [operand.place for operand in operands if operand.role is Role.FACTOR]
    added = next((operand.place for operand in operands if operand.role is Role.SUMMAND), None)

    def run(*local: Any, beta: Any = 1, **_: Any) -> Any:
        of_product = [_at(local, place) for place in factors]
        if added is None:
            return zeros_of_product(shape, of_product)
        if added == 0 and len(local) > len(operands):
            beta = local[len(operands)]
        summand = _at(local, added)
        if not has_gradients(summand):
            beta = int(beta)  # as kernels of whole numbers take it
        if beta == 0:  # then what it is does not count, be it NaN
            return zeros_of_product(shape, [*of_product, summand])
        zeros = zeros_of_product(shape, of_product)
        # In the product's dtype, which autocast may say.
        return zeros + get_platform().cast(summand if beta == 1 else summand * beta, zeros.dtype)

    return replace(found, run=run)


def _at(local: Sequence[Any], place: Any) -> Any:
    return local[place[0]][place[1]] if isinstance(place, tuple) else local[place]


def check_tensors(name: str, *factors: Any) -> None:
    """ValueError where a factor is a plain number."""
    if not all(isinstance(x, Spec) for x in factors):
        raise ValueError(f"all factors of {name} must be tensors")


def check_dims(name: str, wanted: Sequence[int], *factors: Spec) -> None:
    """ValueError unless the factors have these numbers of dims."""
    if any(len(x.shape) != ndim for x, ndim in zip(factors, wanted, strict=True)):
        raise ValueError(
            f"{name} takes tensors with {', '.join(map(str, wanted))} dims, got shapes "
            f"{', '.join(str(x.shape) for x in factors)}"
        )


def check_inner(name: str, a: Shape, b: Shape, inner_a: int, inner_b: int) -> None:
    """ValueError where the sizes that are summed over differ."""
    if inner_a != inner_b:
        raise ValueError(f"{name} of shapes {a} and {b}: the inner sizes {inner_a} and {inner_b} differ")
