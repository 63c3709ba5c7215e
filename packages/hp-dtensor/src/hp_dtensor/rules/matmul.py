"""Matrix products: contractions whose labels the operation's own definition gives. Sums of products keep what is added once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hp_dtensor.rules.contraction import check_dims, check_inner, check_tensors, contraction, of_nothing
from hp_dtensor.rules.elementwise import broadcast_shape
from hp_dtensor.rules.labels import (
    Labelled,
    Labels,
    Operand,
    aligned,
    contracts_nothing,
    labelled,
    numbered,
)
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.spec import Spec

Shape = tuple[int, ...]


# ------------------------------------------------------------------------------------------------------------- two factors
@rule("matmul", params=("input", "other"))
def matmul(a: Any, b: Any) -> Outcome:
    """matmul, mm, bmm, mv, dot: vectors, matrices and batches of them, broadcast over the batch dims."""
    check_tensors("matmul", a, b)
    if not a.shape or not b.shape:
        raise ValueError(f"matmul needs vectors or matrices, got shapes {a.shape} and {b.shape}")
    row: Labels = ("m",) if len(a.shape) > 1 else ()
    column: Labels = ("n",) if len(b.shape) > 1 else ()
    check_inner("matmul", a.shape, b.shape, a.shape[-1], b.shape[-2] if column else b.shape[-1])
    outer_a, outer_b = a.shape[:-2], b.shape[:-2]
    batch = broadcast_shape([outer_a, outer_b]) if outer_a or outer_b else ()
    of_batch = numbered("batch", len(batch))
    shape = (*batch, *(a.shape[-2:-1] if row else ()), *(b.shape[-1:] if column else ()))
    factors = [
        (a, (*aligned(outer_a, batch, of_batch), *row, "k")),
        (b, (*aligned(outer_b, batch, of_batch), "k", *column)),
    ]
    return contraction(factors, (*of_batch, *row, *column), shape)


@rule("reversed_matmul", params=("input", "other"))
def reversed_matmul(b: Any, a: Any) -> Outcome:
    """``a @ b`` where Python asks ``b`` first, because ``a`` is a plain tensor."""
    found = matmul(a, b)
    run = found.run
    return replace(
        found,
        inputs=(found.inputs[1], found.inputs[0]),
        run=None if run is None else lambda y, x: run(x, y),
    )


@rule("linear", params=("input", "weight", ("bias", None)))
def linear(x: Any, weight: Any, bias: Any = None) -> Outcome:
    """``x (..., in) @ weight (out, in).T + bias (out,)``; of a weight ``(in,)`` without the dim ``out``.

    Where the result is a sum, one rank adds the bias.
    """
    check_tensors("linear", x, weight)
    if len(weight.shape) not in (1, 2) or not x.shape or x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"linear needs x (..., in) and weight (out, in) or (in,), got shapes {x.shape} and {weight.shape}"
        )
    out = weight.shape[:-1]
    if bias is not None and bias.shape != out:
        raise ValueError(f"linear with weight {weight.shape} needs a bias {out}, got shape {bias.shape}")
    batch, row = numbered("batch", len(x.shape) - 1), ("n",) * len(out)
    factors = [(x, (*batch, "k")), (weight, (*row, "k"))]
    return contraction(factors, (*batch, *row), (*x.shape[:-1], *out), bias, added_at=2)


@rule("bilinear", params=("input1", "input2", "weight", ("bias", None)))
def bilinear(x: Any, y: Any, weight: Any, bias: Any = None) -> Outcome:
    """``x (..., a), y (..., b), weight (out, a, b)``: the sum over a and b, plus ``bias (out,)``."""
    check_tensors("bilinear", x, y, weight)
    if (
        len(weight.shape) != 3
        or (*x.shape[-1:], *y.shape[-1:]) != weight.shape[1:]
        or x.shape[:-1] != y.shape[:-1]
    ):
        raise ValueError(
            f"bilinear needs x (..., a), y (..., b) and weight (out, a, b), got shapes {x.shape}, {y.shape}, {weight.shape}"
        )
    batch = numbered("batch", len(x.shape) - 1)
    factors = [(x, (*batch, "a")), (y, (*batch, "b")), (weight, ("n", "a", "b"))]
    return contraction(factors, (*batch, "n"), (*x.shape[:-1], weight.shape[0]), bias, added_at=3)


@rule("outer", params=("input", "vec2"))
def outer(x: Any, y: Any) -> Outcome:
    """Every product of an element of one vector with one of the other."""
    check_tensors("outer", x, y)
    check_dims("outer", (1, 1), x, y)
    return contraction([(x, ("m",)), (y, ("n",))], ("m", "n"), (*x.shape, *y.shape))


@rule("inner", params=("input", "other"))
def inner(x: Any, y: Any) -> Outcome:
    """Sums of products along both last dims."""
    check_tensors("inner", x, y)
    if not x.shape or not y.shape:
        raise ValueError(f"inner of shapes {x.shape} and {y.shape}: multiply them with *")
    return tensordot(x, y, ((len(x.shape) - 1,), (len(y.shape) - 1,)))


def _pairs_of_axes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dims = args[2] if len(args) > 2 else 2
    if isinstance(dims, (list, tuple)) and all(isinstance(axes, (list, tuple)) for axes in dims):
        dims = tuple(map(tuple, dims))
    return (*args[:2], dims, *args[3:]), kwargs


@rule("tensordot", params=("a", "b", ("dims", 2)), normalise=_pairs_of_axes)
def tensordot(x: Any, y: Any, dims: Any = 2) -> Outcome:
    """The sum over pairs of dims: the last ``dims`` of one with the first of the other, or the dims of two lists."""
    check_tensors("tensordot", x, y)
    if isinstance(dims, int):
        dims = (tuple(range(len(x.shape) - dims, len(x.shape))), tuple(range(dims)))
    if not isinstance(dims, tuple) or len(dims) != 2 or len(dims[0]) != len(dims[1]):
        raise ValueError(f"tensordot takes a number of dims, or two lists of as many dims; got {dims!r}")
    of_x, of_y = list(numbered("x", len(x.shape))), list(numbered("y", len(y.shape)))
    for i, (p, q) in enumerate(zip(*dims, strict=True)):
        if not (-len(of_x) <= p < len(of_x) and -len(of_y) <= q < len(of_y)):
            raise ValueError(f"tensordot: dims {dims!r} do not fit shapes {x.shape} and {y.shape}")
        check_inner("tensordot", x.shape, y.shape, x.shape[p], y.shape[q])
        of_x[p] = of_y[q] = f"k {i}"
    free = [
        (label, size)
        for own, spec in ((of_x, x), (of_y, y))
        for label, size in zip(own, spec.shape, strict=True)
        if not label.startswith("k")
    ]
    factors = [(x, tuple(of_x)), (y, tuple(of_y))]
    return contraction(factors, tuple(label for label, _ in free), tuple(size for _, size in free))


@rule("vecdot", params=("x", "y"))
def vecdot(x: Any, y: Any, *, dim: int = -1) -> Outcome:
    """Sums of products along one dim of both; the others broadcast."""
    check_tensors("vecdot", x, y)
    shape = broadcast_shape([x.shape, y.shape])
    if not -len(shape) <= dim < len(shape) or dim % len(shape) - len(shape) < -min(
        len(x.shape), len(y.shape)
    ):
        raise ValueError(f"vecdot: dim {dim!r} does not fit shapes {x.shape} and {y.shape}")
    at = dim % len(shape)
    names = tuple("k" if i == at else name for i, name in enumerate(numbered("batch", len(shape))))
    factors = [(t, aligned(t.shape, shape, names)) for t in (x, y)]
    return contraction(factors, (*names[:at], *names[at + 1 :]), (*shape[:at], *shape[at + 1 :]))


@rule("kron", params=("input", "other"))
def kron(x: Any, y: Any) -> Outcome:
    """The Kronecker product. One factor may be a sum.

    A cut of the first factor stays where chunks of its elements make chunks of the product: if it cuts evenly, or the second
    one has size 1 there. One of the second stays where the first has size 1.
    """
    check_tensors("kron", x, y)
    ndim = max(len(x.shape), len(y.shape))
    long = [(1,) * (ndim - len(t.shape)) + t.shape for t in (x, y)]
    shape = tuple(m * n for m, n in zip(*long, strict=True))
    of_x = tuple(f"dim {i}" if n == 1 or m > 1 else "" for i, (m, n) in enumerate(zip(*long, strict=True)))
    of_y = tuple(f"dim {i}" if m == 1 < n else "" for i, (m, n) in enumerate(zip(*long, strict=True)))
    evenly = {f"dim {i}": m for i, (m, n) in enumerate(zip(*long, strict=True)) if m > 1 and n > 1}
    output = tuple(a or b for a, b in zip(of_x, of_y, strict=True))
    factors = [(x, of_x[ndim - len(x.shape) :]), (y, of_y[ndim - len(y.shape) :])]
    return contraction(factors, output, shape, evenly=evenly)


# ------------------------------------------------------------------------------------------------- what is added to a product
def _addition(
    name: str, dims: tuple[int, int, int], factors: tuple[Labels, Labels], output: Labels
) -> Callable[..., Outcome]:
    def plan(added: Any, a: Any, b: Any, beta: Any = 1, alpha: Any = 1) -> Outcome:
        check_tensors(name, added, a, b)
        check_dims(name, dims[1:], a, b)
        sizes: dict[str, int] = {}
        for labels, spec in zip(factors, (a, b), strict=True):
            for label, size in zip(labels, spec.shape, strict=True):
                check_inner(name, a.shape, b.shape, sizes.setdefault(label, size), size)
        shape = tuple(sizes[label] for label in output)
        return contraction(list(zip((a, b), factors, strict=True)), output, shape, added, first=1, added_at=0)

    plan.__doc__ = (
        f"``beta * input + alpha * product``: {name}. Where the result is a sum, one rank adds the input."
    )
    return plan


_ADDITIONS: dict[str, tuple[tuple[int, int, int], tuple[Labels, Labels], Labels, tuple[str, str]]] = {
    "addmm": ((2, 2, 2), (("m", "k"), ("k", "n")), ("m", "n"), ("mat1", "mat2")),
    "addmv": ((1, 2, 1), (("m", "k"), ("k",)), ("m",), ("mat", "vec")),
    "addr": ((2, 1, 1), (("m",), ("n",)), ("m", "n"), ("vec1", "vec2")),
    "baddbmm": ((3, 3, 3), (("b", "m", "k"), ("b", "k", "n")), ("b", "m", "n"), ("batch1", "batch2")),
    "addbmm": ((2, 3, 3), (("b", "m", "k"), ("b", "k", "n")), ("m", "n"), ("batch1", "batch2")),
}
for _name, (_dims, _factors, _output, _params) in _ADDITIONS.items():
    rule(_name, params=("input", *_params), by_value=False)(_addition(_name, _dims, _factors, _output))


@rule("multi_dot", params=("tensors",))
def multi_dot(tensors: Any) -> Outcome:
    """The product of a list of matrices, of which the first and the last may be vectors."""
    if not isinstance(tensors, tuple) or len(tensors) < 2:
        raise ValueError("multi_dot takes a list of two or more matrices")
    check_tensors("multi_dot", *tensors)
    last = len(tensors) - 1
    operands, output, shape = [], [], []
    for i, spec in enumerate(tensors):
        names = (f"d {i}", f"d {i + 1}")
        if len(spec.shape) == 1 and i in (0, last):
            names = names[1:] if i == 0 else names[:1]  # type: ignore[assignment]
        elif len(spec.shape) != 2:
            raise ValueError(
                f"multi_dot takes matrices, and vectors at both ends; got shape {spec.shape} at {i}"
            )
        operands.append(Operand((0, i), spec, names))
        for name, size in zip(names, spec.shape, strict=True):
            if name in ("d 0", f"d {last + 1}"):
                output.append(name)
                shape.append(size)
    results = [Labelled(tuple(output), tuple(shape))]
    found = labelled(operands, results)
    return of_nothing(found, operands) if contracts_nothing(operands, results, found) else found


def _cross(x: Spec, y: Spec, at: int) -> Outcome:
    shape = broadcast_shape([x.shape, y.shape])
    if not -len(shape) <= at < len(shape) or shape[at] != 3:
        raise ValueError(
            f"the vector product along dim {at} of shapes {x.shape} and {y.shape}: it must be a dim of size 3"
        )
    names = tuple(
        "" if i == at % len(shape) else name for i, name in enumerate(numbered("batch", len(shape)))
    )
    return contraction([(t, aligned(t.shape, shape, names)) for t in (x, y)], names, shape)


@rule("cross", params=("input", "other", ("dim", None)))
def cross(x: Any, y: Any, dim: Any = None) -> Outcome:
    """The vector product along a dim of size 3 (None: the first such), which is joined; the other dims broadcast."""
    check_tensors("cross", x, y)
    if dim is not None:
        return _cross(x, y, dim)
    threes = [i for i, n in enumerate(broadcast_shape([x.shape, y.shape])) if n == 3]
    at = threes[0] if threes else 0
    # Another dim may be of size 3 here, which the kernel would take.
    return replace(_cross(x, y, at), around=lambda kernel: lambda a, b, *_: kernel(a, b, dim=at))


@rule("linalg_cross", params=("input", "other"))
def linalg_cross(x: Any, y: Any, *, dim: int = -1) -> Outcome:
    """The same along the last dim, unless told otherwise."""
    check_tensors("cross", x, y)
    return _cross(x, y, dim)
