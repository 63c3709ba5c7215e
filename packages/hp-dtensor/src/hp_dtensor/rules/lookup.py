"""Elements looked up by number: gather, index_select and their kin.

Where the dim that is looked up in is cut, every rank looks up what it has and gives zeros for the rest: a summand of the
result, which is less to move than the table. Where the numbers are cut, so is the result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hp_dtensor.no_elements import zeros_from
from hp_dtensor.placements import PARTIAL, REPLICATE, Shard
from hp_dtensor.rules.along import one_dim, one_place
from hp_dtensor.rules.choice import Way
from hp_dtensor.rules.elementwise import broadcast_shape
from hp_dtensor.rules.labels import Labelled, Operand, Role, aligned, labelled, numbered
from hp_dtensor.rules.refusals import checked, is_beyond
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.spec import Spec, local_block
from hp_platform import get_platform

Tensor = Any


def own_numbers(at: Tensor, offset: int, size: int, n: int) -> tuple[Tensor, Tensor]:
    """Which of the numbers are this rank's, and where they point in its piece; others' point to its first element.

    Numbers that no rank has point behind every piece: each rank's kernel refuses them, and no rank waits for another one.
    Negative ones do so, too, since some kernels count these from the end of what they are given, here of a piece.
    """
    platform = get_platform()
    mine = (at >= offset) & (at < offset + size)
    behind = platform.cast(is_beyond(at, n), at.dtype) * max(size, 1)
    return mine, platform.where(mine, at - offset, behind)


def with_an_element(local: Tensor, dim: int) -> Tensor:
    """The piece itself; for one without elements along ``dim`` one zero, so that kernels see the numbers on every rank."""
    if local.shape[dim]:
        return local
    platform = get_platform()
    shape = (*local.shape[:dim], 1, *local.shape[dim + 1 :])
    return zeros_from(platform.zeros(shape, local.dtype, platform.device_of(local)), [local])


def looked_up(local: Tensor, dim: int, at: Tensor, offset: int, size: int, n: int) -> Tensor:
    """``local[:, ..., at]`` along ``dim``, zeros where ``at`` points into others' pieces."""
    mine, own = own_numbers(at, offset, size, n)
    index = (*(slice(None),) * dim, own)
    return zero_elsewhere(with_an_element(local, dim)[index], mine, dim)


def zero_elsewhere(y: Tensor, mine: Tensor, dim: int) -> Tensor:
    """``y`` with zeros where a number is not this rank's; the dims of the numbers begin at ``dim``."""
    platform = get_platform()
    mine = platform.reshape(mine, (*mine.shape, *(1,) * (len(y.shape) - dim - len(mine.shape))))
    return platform.where(mine, y, platform.zeros_like(y))


def own_block(x: Spec, outcome: Outcome, position: int, dim: int) -> tuple[int, int]:
    """Offset and size of this rank's piece of a dim, as the operation gets it."""
    sizes, offsets = local_block(x.shape, outcome.inputs[position], x.mesh.shape, x.mesh.get_coordinate())
    return offsets[dim], sizes[dim]


def is_cut(outcome: Outcome, position: int, dim: int) -> bool:
    """Whether the operation gets pieces of a dim of an argument."""
    return any(p.is_shard(dim) for p in outcome.inputs[position])


def check_index(index: Any, what: str = "index") -> None:
    """ValueError where no tensor is."""
    if not isinstance(index, Spec):
        raise ValueError(f"{what} must be a tensor of whole numbers, got {index!r}")


@rule("index_select", params=("input", "dim", "index"))
def index_select(x: Any, dim: int, index: Any) -> Outcome:
    """The slices along a dim that a vector of numbers names."""
    check_index(index)
    if len(index.shape) > 1:
        raise ValueError(f"index must be a vector, got shape {index.shape}")
    at = one_place(dim, len(x.shape))
    if not x.shape:
        return labelled(
            [Operand(0, x, ()), Operand(2, index, ("",) * len(index.shape), Role.PLAIN)], [Labelled((), ())]
        )
    labels = tuple(f"dim {i}" if i != at else "" for i in range(len(x.shape)))
    count = index.shape[0] if index.shape else 1
    result = Labelled(
        (*labels[:at], "index" if index.shape else "", *labels[at + 1 :]),
        (*x.shape[:at], count, *x.shape[at + 1 :]),
    )
    found = labelled(
        [Operand(0, x, labels), Operand(2, index, ("index",) * len(index.shape), Role.PLAIN)],
        [result],
        more_ways=[Way((Shard(at), REPLICATE), PARTIAL)],
    )
    found = checked(found, {2: x.shape[at]})
    if not is_cut(found, 0, at):
        return found
    offset, size = own_block(x, found, 0, at)

    def run(local: Tensor, _: int, numbers: Tensor) -> Tensor:
        numbers = get_platform().reshape(numbers, (-1,))
        return looked_up(local, at, numbers, offset, size, x.shape[at])

    return replace(found, run=run)


@rule("slices_at", params=("input", "indices", ("dim", 0), ("batch_dims", 0)))
def slices_at(x: Any, indices: Any, dim: int = 0, batch_dims: int = 0) -> Outcome:
    """The slices along a dim that numbers in any shape name: the dims of the numbers come in its place."""
    check_index(indices, "indices")
    if batch_dims:
        raise ValueError("batch_dims is not taken: use gather() with an index of the tensor's number of dims")
    at = one_dim(dim, len(x.shape))
    labels = tuple(f"dim {i}" if i != at else "" for i in range(len(x.shape)))
    names = numbered("index", len(indices.shape))
    result = Labelled(
        (*labels[:at], *names, *labels[at + 1 :]), (*x.shape[:at], *indices.shape, *x.shape[at + 1 :])
    )
    found = labelled(
        [Operand(0, x, labels), Operand(1, indices, names, Role.PLAIN)],
        [result],
        more_ways=[Way((Shard(at), REPLICATE), PARTIAL)],
    )
    found = checked(found, {1: x.shape[at]})
    if not is_cut(found, 0, at):
        return found
    offset, size = own_block(x, found, 0, at)

    def run(local: Tensor, numbers: Tensor, *_: Any) -> Tensor:
        return looked_up(local, at, numbers, offset, size, x.shape[at])

    return replace(found, run=run)


@rule("gather", params=("input", "dim", "index"))
def gather(x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Outcome:
    """``x[i, index[i, j]]`` (along dim 1): for each place of the index one element along a dim."""
    check_index(index)
    if sparse_grad:
        raise ValueError("sparse gradients have no placements: leave sparse_grad out")
    at = one_place(dim, len(x.shape))
    if () in (x.shape, index.shape) and len(x.shape) + len(index.shape) < 2:
        return _anywhere(x, index, index.shape, ("",) * len(index.shape), 2)
    if len(index.shape) != len(x.shape):
        raise ValueError(f"index needs the {len(x.shape)} dims of the tensor, got shape {index.shape}")
    if any(i != at and n > m for i, (n, m) in enumerate(zip(index.shape, x.shape, strict=True))):
        raise ValueError(
            f"index of shape {index.shape} is larger than {x.shape} along another dim than {dim}"
        )
    return _gathered(x, at, index)


def _gathered(x: Spec, at: int, index: Spec) -> Outcome:
    same = [i != at and index.shape[i] == n for i, n in enumerate(x.shape)]
    labels = tuple(f"dim {i}" if same[i] else "" for i in range(len(x.shape)))
    of_index = tuple("index" if i == at else label for i, label in enumerate(labels))
    found = labelled(
        [Operand(0, x, labels), Operand(2, index, of_index, Role.PLAIN)],
        [Labelled(of_index, index.shape)],
        more_ways=[Way((Shard(at), REPLICATE), PARTIAL)],
    )
    found = checked(found, {2: x.shape[at]})
    if not is_cut(found, 0, at):
        return found
    offset, size = own_block(x, found, 0, at)

    def around(kernel: Any) -> Any:
        def run(local: Tensor, dim: int, numbers: Tensor, **kwargs: Any) -> Tensor:
            platform = get_platform()
            mine, own = own_numbers(numbers, offset, size, x.shape[at])
            y = kernel(with_an_element(local, at), dim, own)
            return platform.where(mine, y, platform.zeros_like(y))

        return run

    return replace(found, around=around)


@rule("take_along_dim", params=("input", "indices", ("dim", None)))
def take_along_dim(x: Any, indices: Any, dim: Any = None) -> Outcome:
    """As gather, where the other dims of both stretch to each other; without a dim in the flattened whole."""
    check_index(indices, "indices")
    if dim is None:
        count = 1
        for n in indices.shape:
            count = count * n
        name = "index" if len(indices.shape) == 1 else ""
        return _anywhere(x, indices, (count,), (name,) * len(indices.shape))
    at = one_dim(dim, len(x.shape))
    if len(indices.shape) != len(x.shape):
        raise ValueError(f"indices need the {len(x.shape)} dims of the tensor, got shape {indices.shape}")
    rest = broadcast_shape([(*s.shape[:at], 1, *s.shape[at + 1 :]) for s in (x, indices)])
    shape = (*rest[:at], indices.shape[at], *rest[at + 1 :])
    names = numbered("dim", len(shape))
    labels = tuple("" if i == at else name for i, name in enumerate(aligned(x.shape, shape, names)))
    of_index = aligned(indices.shape, shape, names)
    found = labelled(
        [Operand(0, x, labels), Operand(1, indices, of_index, Role.PLAIN)], [Labelled(names, shape)]
    )
    return checked(found, {1: x.shape[at]}, from_end=True)


def _anywhere(
    x: Spec, index: Spec, shape: tuple[int, ...], labels: tuple[str, ...], place: int = 1
) -> Outcome:
    """Elements of all of ``x``. ``place``: the position of the index."""
    operands = [Operand(0, x, ("",) * len(x.shape)), Operand(place, index, labels, Role.PLAIN)]
    return labelled(operands, [Labelled(labels if len(labels) == len(shape) else ("",), shape)])


@rule("take", params=("input", "index"))
def take(x: Any, index: Any) -> Outcome:
    """Elements of the flattened whole."""
    check_index(index)
    return _anywhere(x, index, index.shape, numbered("index", len(index.shape)))
