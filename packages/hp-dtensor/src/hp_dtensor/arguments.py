"""Arguments that are no DTensors of one mesh object: plain tensors beside DTensors, equal meshes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hp_dtensor.errors import name_of
from hp_dtensor.placements import REPLICATE
from hp_dtensor.running_module import running_method
from hp_dtensor.spec import make_spec
from hp_dtensor.storage_mesh import advice_of
from hp_platform import get_platform


def members(args: Sequence[Any], tensor_class: Any) -> Iterator[Any]:
    """The DTensors among the arguments, also in lists."""
    for arg in args:
        if isinstance(arg, tensor_class):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from (x for x in arg if isinstance(x, tensor_class))


def adopted(
    function: Any, args: Sequence[Any], tensor_class: Any, wrap: Any, *, writes: bool = False
) -> tuple[Any, ...]:
    """Plain tensors beside DTensors count as replicated: constants such as a table of positions, equal on all ranks.

    Beside DTensors that are only kept in pieces they do so if the operation ``writes`` into one of these, as when weights are
    loaded or pruned, and if they are single numbers: see [Note: kept in pieces] in :mod:`hp_dtensor.storage_mesh`.
    """
    platform = get_platform()
    mesh = next((x._spec.mesh for x in members(args, tensor_class)), None)
    if mesh is None:
        raise ValueError(
            f"{name_of(function)} got DTensors inside of a list or by a keyword, where its rule takes none"
        )

    is_alone = math.prod(mesh.shape) == 1  # then there is one way to lie
    advice = None
    if not writes and all(advice_of(x._spec.mesh) is not None for x in members(args, tensor_class)):
        advice = advice_of(mesh)

    def adopt(x: Any, place: str) -> Any:
        if isinstance(x, tensor_class) or not platform.is_tensor(x):
            return x
        if advice is not None and tuple(x.shape):
            raise RuntimeError(
                f"{place} of {name_of(function)} is a plain tensor of shape {tuple(x.shape)}, beside a DTensor that is only "
                f"kept in pieces: {advice.format(method=running_method())}"
            )
        if platform.requires_grad(x) and platform.is_grad_enabled() and not is_alone:
            raise ValueError(
                f"{place} of {name_of(function)} is a plain tensor of shape {tuple(x.shape)} that requires "
                f"grad, beside a DTensor: say how it lies, with DTensor.from_local(x, mesh, [Replicate(), ...]) or "
                f"distribute_tensor"
            )
        return wrap(x, make_spec(mesh, (REPLICATE,) * len(mesh.shape), tuple(x.shape)))

    return tuple(
        [adopt(x, f"member {i} of argument {position}") for i, x in enumerate(arg)]
        if isinstance(arg, (list, tuple))
        else adopt(arg, f"argument {position}")
        for position, arg in enumerate(args)
    )


def for_plain_target(function: Any, args: Sequence[Any], tensor_class: Any) -> tuple[Any, ...]:
    """Arguments of an operation that writes into a plain tensor: a 0-d DTensor counts as a number, as in ``x.mul_(scale)``.

    Communication: what its ``full_tensor()`` needs. ValueError for any other DTensor, and for one whose gradient is recorded.
    """
    platform = get_platform()

    def read(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(map(read, x))
        if not isinstance(x, tensor_class):
            return x
        if tuple(x.shape) or (platform.is_grad_enabled() and platform.requires_grad(x._local)):
            raise ValueError(
                f"{name_of(function)} would write DTensors into a plain tensor of shape {tuple(args[0].shape)}: write "
                f"x.full_tensor() or x.to_local() into it, or make it a DTensor with distribute_tensor"
            )
        return x.full_tensor()

    return tuple(map(read, args))


_NUMBERS = frozenset({"alpha", "beta", "value"})
"""Keyword arguments that are numbers, for which frameworks take a tensor of one element, too."""


def with_numbers(function: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments without tensors: a 0-d one that stands for a number, such as a learning rate, is read.

    Communication: for a DTensor what its ``item()`` needs. ValueError for any other tensor.
    """
    platform = get_platform()

    def read(name: str, value: Any) -> Any:
        if not platform.is_tensor(value):
            return value
        is_recorded = platform.is_grad_enabled() and platform.requires_grad(getattr(value, "_local", value))
        if name not in _NUMBERS or tuple(value.shape) or is_recorded:
            raise ValueError(
                f"{name_of(function)} of a DTensor takes no tensor for its argument {name!r}: give it by position, or leave "
                f"it out"
            )
        return value.item()

    return {name: read(name, value) for name, value in kwargs.items()}


def on_one_mesh(function: Any, args: Sequence[Any], tensor_class: Any, wrap: Any) -> tuple[Any, ...]:
    """All DTensors on the mesh of the first. Communication: reduces what is Partial on another mesh.

    Meshes that are equal but not one object count as one. What is whole (or Partial) on another mesh of the same ranks, such
    as the norm of a gradient, is whole on this one. Others are refused.
    """
    meshes = [x._spec.mesh for x in members(args, tensor_class)]
    # Beside a tensor that somebody has distributed, one that is kept in pieces is a DTensor as any other.
    mesh = next((each for each in meshes if advice_of(each) is None), meshes[0])

    def move(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [move(member) for member in x]
        if not isinstance(x, tensor_class) or x._spec.mesh is mesh:
            return x
        spec = x._spec
        if spec.mesh == mesh:
            return wrap(x._local, make_spec(mesh, spec.placements, spec.shape))
        is_nowhere_cut = all(p.is_replicate() or p.is_partial() for p in spec.placements)
        if is_nowhere_cut and set(spec.mesh.rank_list) == set(mesh.rank_list):
            whole = x.redistribute(placements=[REPLICATE] * len(spec.placements))
            return wrap(whole._local, make_spec(mesh, (REPLICATE,) * len(mesh.shape), spec.shape))
        # Numbers that come together are what clipping makes: norms of gradients, each on its gradient's mesh.
        are_numbers = isinstance(args[0], (list, tuple)) and not spec.shape
        norms = "; norms of gradients on several meshes: hp_optim.clip_grad_norm_" if are_numbers else ""
        raise ValueError(
            f"{name_of(function)} got DTensors on two meshes, {mesh} and {spec.mesh}: bring them to one mesh with "
            f"redistribute(mesh, placements), or make the other one Replicate if its mesh has the same ranks{norms}"
        )

    return tuple(map(move, args))
