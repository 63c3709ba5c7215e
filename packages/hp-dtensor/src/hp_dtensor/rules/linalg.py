"""Functions of whole matrices: their two dims are joined, the batch dims in front may be cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hp_dtensor.rules.elementwise import broadcast_shape
from hp_dtensor.rules.labels import Labelled, Operand, Role, aligned, labelled, numbered
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.spec import Spec
from hp_platform import get_platform

Shape = tuple[int, ...]
SizesOfResults = Callable[..., list[Shape]]
"""From rows and columns of the matrix, and options, to the last dims of every result."""


def _of_matrices(name: str, x: Any, lasts: list[Shape], is_tuple: bool = False) -> Outcome:
    if not isinstance(x, Spec) or len(x.shape) < 2:
        raise ValueError(f"{name} takes a matrix or a batch of matrices (..., rows, columns), got {x}")
    batch = x.shape[:-2]
    labels = numbered("batch", len(batch))
    results = [Labelled((*labels, *("",) * len(last)), (*batch, *last)) for last in lasts]
    return labelled([Operand(0, x, (*labels, "", ""), Role.PLAIN)], results, is_tuple=is_tuple)


def _qr(m: int, n: int, mode: str = "reduced") -> list[Shape]:
    k = min(m, n)
    sizes: dict[str, list[Shape]] = {
        "reduced": [(m, k), (k, n)],
        "complete": [(m, m), (m, n)],
        "r": [(0,), (k, n)],
    }
    if mode not in sizes:
        raise ValueError(f"mode is {mode!r}; it is one of {', '.join(sizes)}")
    if mode == "r":
        raise ValueError("mode='r' gives a factor without elements: use mode='reduced' and leave it")
    return sizes[mode]


def _svd(m: int, n: int, full_matrices: bool = True) -> list[Shape]:
    k = min(m, n)
    return [(m, m), (k,), (n, n)] if full_matrices else [(m, k), (k,), (k, n)]


# Name -> last dims of the results, for a matrix of m rows and n columns.
_OF_ONE: dict[str, SizesOfResults] = {
    "same_matrix": lambda m, n, *_, **__: [(m, n)],
    "transposed_matrix": lambda m, n, *_, **__: [(n, m)],
    "number_of_matrix": lambda m, n, *_, **__: [()],
    "row_of_matrix": lambda m, n, *_, **__: [(min(m, n),)],
    "slogdet": lambda m, n: [(), ()],
    "eigh": lambda m, n, *_, **__: [(n,), (m, n)],
    "cholesky_ex": lambda m, n, *_, **__: [(m, n), ()],
    "lu_factor": lambda m, n, *_, **__: [(m, n), (min(m, n),)],
    "lu": lambda m, n, *_, **__: [(m, m), (m, min(m, n)), (min(m, n), n)],
    "qr": _qr,
    "svd": _svd,
}
_WHAT = {
    "same_matrix": "inv, matrix_exp, matrix_power, cholesky and the like: a matrix of the same shape.",
    "transposed_matrix": "pinv: a matrix of the transposed shape.",
    "number_of_matrix": "det, logdet, cond, matrix_rank: one number per matrix.",
    "row_of_matrix": "eigvals, eigvalsh, svdvals: one row of numbers per matrix.",
}


def _enter(name: str, sizes: SizesOfResults) -> None:
    def plan(x: Any, *args: Any, **kwargs: Any) -> Outcome:
        rows = x.shape[-2:] if isinstance(x, Spec) and len(x.shape) >= 2 else (0, 0)
        lasts = sizes(*rows, *args, **kwargs)
        return _of_matrices(name, x, lasts, is_tuple=name not in _WHAT)

    plan.__doc__ = _WHAT.get(name, f"{name} of matrices.")
    rule(name, params=("input",))(plan)


for _name, _function in _OF_ONE.items():
    _enter(_name, _function)


def _solved(matrix: Spec, right: Spec, places: tuple[int, int], free: tuple[str, str]) -> Outcome:
    """Of a matrix and right sides, with batches that broadcast: linear in the right sides, one by one along the ``free`` dim."""
    shapes = [matrix.shape[:-2], right.shape[:-2]]
    batch = broadcast_shape(shapes) if any(shapes) else ()
    labels = numbered("batch", len(batch))
    operands = [
        Operand(place, x, (*aligned(x.shape[:-2], batch, labels), *last), role)
        for place, x, last, role in zip(
            places, (matrix, right), (("", ""), free), (Role.PLAIN, Role.FACTOR), strict=True
        )
    ]
    return labelled(operands, [Labelled((*labels, *free), (*batch, *right.shape[-2:]))])


def _check_two(name: str, a: Any, b: Any) -> None:
    if not all(isinstance(x, Spec) and len(x.shape) >= 2 for x in (a, b)):
        raise ValueError(f"{name} takes two matrices or batches of matrices (..., rows, columns)")


@rule("solve", params=("A", "B"))
def solve(a: Any, b: Any, *, left: bool = True, **options: Any) -> Outcome:
    """linalg.solve and linalg.solve_triangular: ``a x = b`` (or ``x a = b``).

    ``b`` of the first may be a vector, or a batch of them; which it is, the global shapes say. Linear in ``b``, whose columns (or
    rows) may be cut.
    """
    is_triangular = "upper" in options
    if isinstance(a, Spec) and isinstance(b, Spec) and len(a.shape) >= 2 and not is_triangular:
        is_vector = len(b.shape) == 1 or (len(b.shape) == len(a.shape) - 1 and b.shape == a.shape[:-1])
        if is_vector:
            labels = numbered("batch", len(a.shape) - 2)
            operands = [
                Operand(0, a, (*labels, "", ""), Role.PLAIN),
                Operand(1, b, (*labels[len(labels) + 1 - len(b.shape) :], "")),
            ]
            return labelled(operands, [Labelled((*labels, ""), a.shape[:-1])])
    _check_two("solve", a, b)
    found = _solved(a, b, (0, 1), ("", "right side") if left else ("right side", ""))
    if is_triangular or len(b.shape) != len(a.shape) - 1:
        return found
    # Of a piece of the batch the kernel might take the matrix for a batch of vectors; of one with a dim in front it cannot.
    return replace(found, around=_with_a_batch)


def _with_a_batch(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(a: Any, b: Any, *args: Any, **options: Any) -> Any:
        return kernel(a, get_platform().reshape(b, (1, *b.shape)), *args, **options)

    return run


@rule("cholesky_solve", params=("B", "L", ("upper", False)))
def cholesky_solve(b: Any, factor: Any, upper: bool = False) -> Outcome:
    """``x`` of ``L L^T x = b``. Linear in ``b``, whose columns may be cut."""
    _check_two("cholesky_solve", b, factor)
    return _solved(factor, b, (1, 0), ("", "right side"))
