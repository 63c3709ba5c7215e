"""What linear layers in styles do at their doors with ``overlap``: the door's collective and the product beside each other."""

from __future__ import annotations

import math
from typing import Any

from hp_dtensor import Placement
from hp_dtensor.dtensor import DTensorMethods
from hp_dtensor.placements import Shard
from hp_dtensor.spec import resolve
from hp_platform import get_platform
from hp_tp.overlap.functions import all_gather_matmul, matmul_reduce_scatter
from hp_tp.overlap.policy import OverlapPolicy
from hp_tp.styles import put_off
from hp_tp.styles.door import Door
from hp_tp.styles.entrance import as_dtensor, enter_whole, whole_shape
from hp_tp.styles.moves import cut_along
from hp_tp.styles.shared import may_share, shared

Tensor = Any


def linear_of_whole(
    x: Tensor, weight: Tensor, bias: Tensor | None, parameter: Any, door: Door, policy: OverlapPolicy
) -> Tensor:
    """``linear`` of the whole input: as ``linear(enter_whole(x, door), weight, bias)``, with the same communication.

    The first layer that gets a piece gathers it beside its product; those that get the same tensor find it whole. In code that is
    being compiled, for small inputs and those that are no pieces of their rows, it is just that. ``parameter``: what the module shows where
    ``weight`` comes from.
    """
    platform = get_platform()
    # A first bound, of a DTensor far too high: what is small is to cost the host nothing.
    is_small = platform.is_compiling() or policy.is_plain(
        math.prod(x.shape) * door.mesh.shape[0] * platform.itemsize(x.dtype)
    )
    if is_small:
        return put_off.linear(enter_whole(x, door), weight, bias, parameter)
    found = _piece(x, door)
    if found is None or policy.is_plain(math.prod(found[2]) * platform.itemsize(x.dtype)):
        return put_off.linear(enter_whole(x, door), weight, bias, parameter)
    local, dim, shape = found
    made: list[Tensor] = []

    def gather(used: Any) -> Tensor:
        cut = cut_along(door.mesh, dim, shape)
        (product,), whole = all_gather_matmul(local, [weight], cut, biases=[bias], policy=policy, used=used)
        made.append(product)
        return whole

    # The key is that of enter_whole: layers with and without overlap may get the same tensor. What autocast has cast is another.
    key = ("gather", platform.product_dtype(local), dim)
    whole = shared(local, door, key, gather, is_copy=True) if may_share(local) else gather(None)
    return made[0] if made else put_off.linear(whole, weight, bias, parameter)


def _piece(x: Tensor, door: Door) -> tuple[Tensor, int, tuple[int, ...]] | None:
    """This rank's piece, along which dim it is one, and the shape of the whole; None if it is none of rows."""
    if door.mesh.shape[0] == 1 or get_platform().is_compiling():
        return None
    if isinstance(x, DTensorMethods):
        as_dtensor(x, door)  # refuses another mesh
        placement, local = x.placements[0], x._local
    else:
        placement, local = door.layout, x
    if not isinstance(placement, Shard):
        return None
    shape = tuple(x.shape) if isinstance(x, DTensorMethods) else whole_shape(x, door)
    dim = placement.dim % len(shape)
    return None if dim == len(shape) - 1 else (local, dim, shape)


def summed_linear(
    x: Tensor, weight: Tensor, wanted: Placement, door: Door, policy: OverlapPolicy
) -> Tensor | None:
    """This rank's piece of the ranks' sum of ``linear(x, weight)``, where the result shall be cut along rows; else None."""
    platform, ndim = get_platform(), len(x.shape)
    if door.mesh.shape[0] == 1 or platform.is_compiling():
        return None
    if policy.is_plain(math.prod(x.shape[:-1]) * weight.shape[0] * platform.itemsize(x.dtype)):
        return None
    (wanted,) = resolve(door.mesh, [wanted], ndim)
    if not isinstance(wanted, Shard) or wanted.dim == ndim - 1:
        return None
    return matmul_reduce_scatter(x, weight, cut_along(door.mesh, wanted.dim, tuple(x.shape)), policy=policy)
