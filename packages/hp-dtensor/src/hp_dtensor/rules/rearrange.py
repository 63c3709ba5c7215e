"""Values that move or repeat within a tensor: repeat, tile, roll, flip, rotations, padding. Linear.

A dim along which they move is joined first; all others stay as they are cut.

[Note: what joining costs] Less could move only where the length of the dim stays: roll by k hands k elements over each boundary
between chunks, flip hands every chunk to one other rank. That is an exchange between pairs of ranks, forward and backward, which
rules do not have: they compute on pieces, gather and reduce. Where the length changes (pad, repeat, and cat and split in
:mod:`hp_dtensor.rules.join` and :mod:`hp_dtensor.rules.split`), so does the size of the chunks, and with it every boundary:
nearly all elements change ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.rules.along import dims_of, one_dim, one_place
from hp_dtensor.rules.labels import Labelled, Labels, Operand, Role, labelled, local_shape, numbered
from hp_dtensor.rules.registry import EVERY_KIND, Outcome, rule
from hp_dtensor.spec import Spec
from hp_platform import get_platform

Shape = tuple[int, ...]


def along(x: Spec, dims: Collection[int], shape: Shape, role: Role = Role.FACTOR) -> Outcome:
    """An operation that needs all of ``dims`` and keeps the number of dims; ``shape`` is the result's."""
    labels = tuple("" if i in dims else f"dim {i}" for i in range(len(x.shape)))
    return labelled([Operand(0, x, labels, role)], [Labelled(labels, shape)])


def _ints(values: Any, what: str) -> Shape:
    found = (values,) if isinstance(values, int) else tuple(values)
    if any(isinstance(n, bool) or not isinstance(n, int) for n in found):
        raise ValueError(f"{what} must be ints, got {values!r}")
    return found


def _repeated(x: Spec, counts: Shape) -> Outcome:
    if any(n < 0 for n in counts):
        raise ValueError(f"a tensor cannot be repeated {counts} times: no count may be negative")
    new = len(counts) - len(x.shape)
    own = (1,) * new + x.shape
    labels = tuple(f"dim {i}" if n == 1 and i >= new else "" for i, n in enumerate(counts))
    shape = tuple(n * size for n, size in zip(counts, own, strict=True))
    return labelled([Operand(0, x, labels[new:])], [Labelled(labels, shape)])


@rule("repeat", params=("input", "repeats"), packs=1, carries=EVERY_KIND)
def repeat(x: Any, repeats: Any) -> Outcome:
    """The whole, so often along each dim; new dims in front."""
    counts = _ints(repeats, "the counts of repeat")
    if len(counts) < len(x.shape):
        raise ValueError(f"repeat of a tensor with {len(x.shape)} dims needs a count for each, got {counts}")
    return _repeated(x, counts)


@rule("tile", params=("input", "dims"), packs=1, carries=EVERY_KIND)
def tile(x: Any, dims: Any) -> Outcome:
    """As repeat, with counts of 1 for the first dims where some are missing."""
    counts = _ints(dims, "the counts of tile")
    return _repeated(x, (1,) * (len(x.shape) - len(counts)) + counts)


@rule("roll", params=("input", "shifts", ("dim", None)), carries=EVERY_KIND)
def roll(x: Any, shifts: Any, dims: Any = None) -> Outcome:
    """Shifted along dims, what falls off comes in at the other end; without dims as one long vector."""
    amounts = _ints(shifts, "shifts")
    if dims is None or dims == ():
        return along(x, range(len(x.shape)), x.shape)
    at = _ints(dims, "dims")
    if len(at) != len(amounts):
        raise ValueError(f"roll needs a shift for each dim, got shifts {shifts!r} and dims {dims!r}")
    return along(x, [one_dim(d, len(x.shape)) for d in at], x.shape)


@rule("flip", params=("input", "dim"), packs=1, carries=EVERY_KIND)
def flip(x: Any, dims: Any) -> Outcome:
    """Dims in reverse order."""
    return along(x, dims_of(dims, len(x.shape)) if dims != () else (), x.shape)


@rule("fliplr", params=("input",), carries=EVERY_KIND)
def fliplr(x: Any) -> Outcome:
    """Columns in reverse order."""
    return along(x, (_dim_of_at_least(x, 2, 1),), x.shape)


@rule("flipud", params=("input",), carries=EVERY_KIND)
def flipud(x: Any) -> Outcome:
    """Rows in reverse order."""
    return along(x, (_dim_of_at_least(x, 1, 0),), x.shape)


def _dim_of_at_least(x: Spec, ndim: int, dim: int) -> int:
    if len(x.shape) < ndim:
        raise ValueError(f"needs a tensor with at least {ndim} dims, got shape {x.shape}")
    return dim


@rule("rot90", params=("input", ("k", 1), ("dim", (0, 1))), carries=EVERY_KIND)
def rot90(x: Any, k: int = 1, dims: Any = (0, 1)) -> Outcome:
    """A quarter turn, ``k`` times, from the first of two dims to the second.

    One dim is turned round, and joined for that; the other one takes its cut to the other's place.
    """
    turned = dims_of(tuple(dims), len(x.shape)) if len(tuple(dims)) else ()
    if len(turned) != 2:
        raise ValueError(f"rot90 needs two different dims, got {dims!r}")
    if k % 4 == 0:
        return along(x, (), x.shape)
    if k % 2 == 0:
        return along(x, turned, x.shape)
    a, b = turned
    labels = [f"dim {i}" for i in range(len(x.shape))]
    labels[b if k % 4 == 1 else a] = ""
    order = list(range(len(x.shape)))
    order[a], order[b] = b, a
    result = Labelled(tuple(labels[i] for i in order), tuple(x.shape[i] for i in order))
    return labelled([Operand(0, x, tuple(labels))], [result])


@rule("pad", params=("input", "pad", ("mode", "constant"), ("value", None)), carries=EVERY_KIND)
def pad(x: Any, pad: Any, mode: str = "constant", value: Any = None) -> Outcome:
    """Values before and after dims, in pairs from the last dim on; negative numbers cut off.

    With zeros it is linear, and also where the new values are copies of old ones.
    """
    amounts = _ints(pad, "pad")
    if len(amounts) % 2 or len(amounts) > 2 * len(x.shape):
        raise ValueError(
            f"pad needs a pair of numbers for each of at most {len(x.shape)} dims, got {tuple(pad)}"
        )
    sizes, touched = list(x.shape), set()
    for i in range(len(amounts) // 2):
        dim, (before, after) = len(sizes) - 1 - i, amounts[2 * i : 2 * i + 2]
        if sizes[dim] + before + after < 0:
            raise ValueError(f"pad {tuple(pad)} cuts more from dim {dim} than its {sizes[dim]} elements")
        sizes[dim] = sizes[dim] + before + after
        if before or after:
            touched.add(dim)
    is_linear = mode != "constant" or value is None or value == 0
    found = along(x, touched, tuple(sizes), Role.FACTOR if is_linear else Role.PLAIN)
    assert found.output is not None
    target = local_shape(x, found.output, found.shape)
    if mode == "constant" or 0 not in target:
        return found
    # Kernels of the other modes refuse pieces without elements.
    return replace(found, run=lambda local, *_: _zeros(local, target))


def _zeros(like: Any, shape: Shape) -> Any:
    platform = get_platform()
    return platform.zeros(shape, like.dtype, platform.device_of(like))


@rule("unfold", params=("input", "dim", "size", "step"), views=True)
def unfold(x: Any, dim: int, size: int, step: int) -> Outcome:
    """Windows along a dim: their number in its place, their elements in a new last dim."""
    at = one_place(dim, len(x.shape))
    whole = x.shape[at] if x.shape else 1
    if size < 0 or size > whole or step < 1:
        raise ValueError(f"windows of size {size} every {step} do not fit dim {dim} of size {whole}")
    labels: Labels = tuple("" if i == at else f"dim {i}" for i in range(len(x.shape)))
    shape = [*x.shape, size]
    if x.shape:
        shape[at] = (whole - size) // step + 1
    return labelled([Operand(0, x, labels)], [Labelled((*labels, ""), tuple(shape))])


# ------------------------------------------------------------------------------------------------- elements that repeat
@rule("repeat_interleave", params=("input", ("repeats", None), ("dim", None)), carries=EVERY_KIND)
def repeat_interleave(x: Any, repeats: Any = None, dim: Any = None, *, output_size: Any = None) -> Outcome:
    """Each element so often, one after the other, along a dim or of the flattened whole.

    With a tensor of counts, or of a tensor of counts alone, everything is joined first: the size of the result is in the
    values.
    """
    if not isinstance(repeats, int):
        return Outcome.of_values(*(arg for arg in (x, repeats) if arg is not None))
    if repeats < 0:
        raise ValueError(f"elements cannot be repeated {repeats} times")
    if dim is None:
        count = repeats
        for n in x.shape:
            count = count * n
        labels = numbered("dim", len(x.shape))
        whole = labelled([Operand(0, x, ("",) * len(labels))], [Labelled(("",), (count,))])
        return replace(whole, shape=(count,))
    at = one_dim(dim, len(x.shape))
    return along(x, (at,) if repeats != 1 else (), _with(x.shape, at, x.shape[at] * repeats))


def _with(shape: Sequence[int], dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])
