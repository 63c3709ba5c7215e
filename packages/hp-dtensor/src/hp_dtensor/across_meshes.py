"""From one mesh to another: of the same ranks in another shape or order, or of other ranks.

What is Partial is reduced on the first mesh; then every rank gets the block that it wants in one all-to-all over the ranks of
both meshes; what shall be Partial becomes so on the second mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor.exchange import Exchange, blocks_on, exchange
from hp_dtensor.layout import Layout, plain_placements
from hp_dtensor.placements import REPLICATE, Partial, Placement, RaggedShard
from hp_dtensor.redistribution import moves_between, run_moves
from hp_dtensor.spec import Spec, make_spec, resolve
from hp_platform import get_platform, group_of

Tensor = Any


def check_same_ranks(source: Any, target: Any) -> None:
    """ValueError unless both meshes hold the same ranks."""
    from hp_dtensor.creation import check_mesh

    check_mesh(target)
    if set(source.rank_list) != set(target.rank_list):
        raise ValueError(
            f"redistribute goes to a mesh of the same ranks as {source}, got {target}: to give the tensor to other ranks let "
            f"all ranks of both meshes call hp_dtensor.transfer"
        )


def blockwise(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The nearest placements in which every rank holds a block of values."""
    return tuple(REPLICATE if isinstance(p, (Partial, RaggedShard)) else p for p in placements)


def move_to_mesh(local: Tensor, source: Spec, target: Spec) -> Tensor:
    """This rank's piece of ``target`` from its piece of ``source`` on another mesh of the same ranks. Differentiable."""
    between = make_spec(source.mesh, blockwise(source.placements), source.shape)
    landing = make_spec(target.mesh, blockwise(target.placements), target.shape)
    local = run_moves(local, source, moves_between(source, between))
    local = exchange(
        local, _exchange(between.mesh, between.placements, landing.mesh, landing.placements, source.shape)
    )
    return run_moves(local, landing, moves_between(landing, target))


def _exchange(
    source: Any, at: Sequence[Placement], target: Any, to: Sequence[Placement], shape: Any
) -> Exchange:
    ranks = sorted({*source.rank_list, *target.rank_list})
    return Exchange(group_of(ranks), blocks_on(source, at, shape), blocks_on(target, to, shape))


class Sent:
    """What :func:`transfer` leaves on a rank that is not in the target mesh."""

    __slots__ = ("_end",)

    def __init__(self, end: Tensor) -> None:
        self._end = end

    def backward(self) -> None:
        """Take part in the backward of the ranks that hold the tensor now. All ranks of both meshes run backward.

        RuntimeError if the tensor that was sent requires no grad.
        """
        platform = get_platform()
        if not platform.requires_grad(self._end):
            raise RuntimeError(
                "the tensor that was sent requires no grad, so nothing comes back: leave backward() out"
            )
        platform.backward([self._end], [platform.zeros_like(self._end)])


def transfer(
    x: Any,
    target: Layout,
    *,
    source: Layout | None = None,
    shape: Sequence[int] | None = None,
    dtype: Any = None,
    requires_grad: bool = False,
) -> Any:
    """Give a DTensor to the ranks of another mesh. All ranks of both meshes call; differentiable.

    Args:
        x: the DTensor; None on ranks that are not in its mesh.
        target: mesh and placements of the result.
        source: mesh and placements of ``x``; needed where ``x`` is None, like the next ones.
        shape: its global shape.
        dtype: its dtype, or the name of it.
        requires_grad: whether ``x`` requires grad on the ranks that hold it.

    Returns the DTensor on ranks of the target mesh, a :class:`Sent` on all others: they call its ``backward()`` when the ranks
    of the target mesh run backward, so that the gradient comes back.

    Communication: one all-to-all over the ranks of both meshes, in which each gets what it lacks; before it the all-reduces of
    what is Partial. ValueError if a rank without ``x`` is not told what it is, or a rank is in neither mesh.
    """
    platform = get_platform()
    if not isinstance(target, Layout):
        raise ValueError(
            f"transfer takes a Layout as target, got {target!r}: make one with Layout.from_device_mesh(mesh)(...)"
        )
    if x is None:
        if source is None or shape is None or dtype is None:
            raise ValueError(
                "transfer on a rank outside of the tensor's mesh needs source=, shape= and dtype= of the tensor"
            )
        shape = tuple(shape)
        first = source.mesh
        placements = resolve(first, plain_placements(first, source, len(shape)), len(shape))
        kind = platform.device(first.device_type)
        local = platform.empty((0,), platform.dtype(dtype), kind.current())
        local = platform.set_requires_grad_(local, True) if requires_grad else local
    else:
        spec: Spec = x._spec
        first, shape, placements, local = spec.mesh, spec.shape, spec.placements, x._local
        between = make_spec(first, blockwise(placements), shape)
        local = run_moves(local, spec, moves_between(spec, between))
    at = blockwise(placements)
    to = blockwise(resolve(target.mesh, target, len(shape)))
    is_there = target.mesh.get_coordinate() is not None
    if first.get_coordinate() is None and not is_there:
        raise ValueError(
            f"this rank is neither in {first} nor in {target.mesh}: only ranks of these call transfer"
        )
    moved = exchange(local, _exchange(first, at, target.mesh, to, shape))
    if not is_there:
        return Sent(moved)
    from hp_dtensor.native import DTensor

    landing = make_spec(target.mesh, to, shape)
    final = make_spec(target.mesh, target, shape)
    return DTensor._wrap(run_moves(moved, landing, moves_between(landing, final)), final)
