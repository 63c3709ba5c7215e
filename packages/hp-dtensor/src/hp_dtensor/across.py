"""What a rule's ``run`` asks of the other ranks: small reductions and gathers of values that it computes on the way.

A few operations cannot be told as local work between conversions: a standard deviation needs the mean of the whole, a mean
loss the number of valid targets on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hp_dtensor import conversions
from hp_dtensor.spec import Spec
from hp_platform import get_platform

Tensor = Any


def cutting(spec: Spec, dims: Iterable[int]) -> tuple[int, ...]:
    """The mesh dims of more than one rank along which one of these tensor dims is cut."""
    wanted = set(dims)
    return tuple(
        i
        for i, placement in enumerate(spec.placements)
        if placement.is_shard() and placement.dim in wanted and spec.mesh.shape[i] > 1  # type: ignore[attr-defined]
    )


def total(x: Tensor, spec: Spec, mesh_dims: Iterable[int]) -> Tensor:
    """The sum of the ranks' ``x``, equal on all of them. One all-reduce of ``x`` per mesh dim; backward: the identity."""
    for mesh_dim in mesh_dims:
        x = conversions.all_reduce(x, spec.mesh.get_group(mesh_dim))
    return x


def used_differently(x: Tensor, spec: Spec, mesh_dims: Iterable[int]) -> Tensor:
    """``x``, equal on all ranks, for an expression that differs between them. Backward: one all-reduce per mesh dim."""
    groups = tuple(spec.mesh.get_group(mesh_dim) for mesh_dim in mesh_dims)
    return conversions.mark(x, groups) if groups and get_platform().requires_grad(x) else x


def reduced(x: Tensor, spec: Spec, mesh_dims: Iterable[int], op: str) -> Tensor:
    """The reduction ``op`` of the ranks' values, without gradient. One all-reduce of ``x`` per mesh dim."""
    x = get_platform().detach(x)
    for mesh_dim in mesh_dims:
        x = conversions.reduced(x, spec.mesh.get_group(mesh_dim), op)
    return x


def of_each(x: Tensor, spec: Spec, mesh_dims: Iterable[int]) -> list[Tensor]:
    """The values of all ranks along these mesh dims, in the order in which these cut a dim (the first one outermost).

    Differentiable, for an expression that differs between the ranks. One all-gather per mesh dim; backward: one all-reduce of
    all values per mesh dim.
    """
    platform = get_platform()
    xs = platform.reshape(x, (1, *x.shape))
    for mesh_dim in reversed(tuple(mesh_dims)):
        group, positions = spec.mesh.get_group(mesh_dim), spec.mesh.group_positions(mesh_dim)
        if platform.requires_grad(x) and platform.is_grad_enabled():
            xs = conversions.gather_each(xs, group, positions[spec.mesh.get_coordinate()[mesh_dim]])
        else:
            xs = conversions.gathered(platform.detach(xs), group)
        if positions != tuple(range(len(positions))):
            blocks = platform.split(xs, [xs.shape[0] // len(positions)] * len(positions))
            xs = platform.cat([blocks[position] for position in positions])
    return [platform.reshape(piece, tuple(x.shape)) for piece in platform.split(xs, [1] * xs.shape[0])]


def gathered(x: Tensor, spec: Spec, mesh_dims: Iterable[int]) -> list[Tensor]:
    """The values of all ranks along these mesh dims, without gradient. One all-gather per mesh dim."""
    platform = get_platform()
    xs = platform.reshape(platform.detach(x), (1, *x.shape))
    for mesh_dim in mesh_dims:
        xs = conversions.gathered(xs, spec.mesh.get_group(mesh_dim))
    return [platform.reshape(piece, tuple(x.shape)) for piece in platform.split(xs, [1] * xs.shape[0])]
