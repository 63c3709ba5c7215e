"""Functions on lists of tensors, which optimizers and clipping call: unwrap, run once on the local tensors, wrap.

They are elementwise, so the tensors at one index of all lists must lie alike. No plan is kept: there is nothing to ask a rule,
and the numbers in the lists change with every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.dtensor import DTensorMethods
from hp_dtensor.errors import name_of
from hp_dtensor.placements import REPLICATE, Placement, Shard
from hp_dtensor.ragged import ragged_dim
from hp_dtensor.spec import Spec, make_spec, shown
from hp_platform import collectives, get_platform

Tensor = Any


def elementwise(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, writes: bool) -> Any:
    """``function(xs, ...)`` where ``xs`` is the first list, and each other one has one tensor or number per tensor of it.

    Args:
        function: of the framework; gives one tensor per tensor of ``xs``, or nothing.
        args: lists, numbers, and plain tensors of one element.
        kwargs: the same.
        writes: whether the function writes into its lists, which therefore stay as they lie.

    At an index where the lists' tensors lie differently, they are brought to how that of ``xs`` lies (where that broadcasts,
    as the one that it broadcasts to), and a sum is reduced first; what is written must lie so already. Communication: that of
    these moves; none for the lists of an optimizer.
    ValueError for what does not fit.
    """
    targets = list(next(arg for arg in args if isinstance(arg, (list, tuple))))
    if not writes:
        lists = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, (list, tuple))]
        targets = [_largest([xs[i] for xs in lists if i < len(xs)]) for i in range(len(targets))]
    specs = _specs_of(targets, function, writes=writes)

    def local(name: Any, arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            if len(arg) not in (0, len(targets)):
                raise ValueError(
                    f"{name_of(function)}: argument {name} has {len(arg)} members, the first list {len(targets)}"
                )
            return [
                # Lists of an optimizer are long, and lie all alike: the common case is told without a call.
                x._local
                if isinstance(x, DTensorMethods) and x._spec is spec and spec.shape
                else _local(x, spec, function, i)
                for i, (x, spec) in enumerate(zip(arg, specs, strict=False))
            ]
        return _number(arg, function, name)

    result = function(
        *(local(i, arg) for i, arg in enumerate(args)),
        **{name: local(name, arg) for name, arg in kwargs.items()},
    )
    if result is None or writes:
        return None if result is None else targets
    return [x if spec is None else _wrap(x, spec) for x, spec in zip(result, specs, strict=True)]


def _wrap(x: Tensor, spec: Spec) -> Any:
    from hp_dtensor.native import DTensor

    return DTensor._wrap(x, spec)


def _largest(xs: Sequence[Any]) -> Any:
    """Of the members at one index the one as which the result lies: the first, unless it broadcasts to another one."""
    found = xs[0]
    for x in xs[1:]:
        if isinstance(x, DTensorMethods):
            shape = tuple(getattr(found, "shape", ()))
            if shape != x._spec.shape and _fits(shape, x._spec):
                found = x
    return found


def _specs_of(targets: Sequence[Any], function: Any, *, writes: bool) -> list[Spec | None]:
    """How the result lies at each index: see :func:`_spec_at`, which is asked once for tensors that lie alike."""
    known: dict[Spec, Spec | None] = {}
    found: list[Spec | None] = []
    for x in targets:
        given = x._spec if isinstance(x, DTensorMethods) else None
        if given is None:
            found.append(None)
            continue
        if given not in known:
            known[given] = _spec_at(x, function, writes=writes)
        found.append(known[given])
    return found


def _spec_at(x: Any, function: Any, *, writes: bool) -> Spec | None:
    if not isinstance(x, DTensorMethods):
        return None
    spec = x._spec
    if not any(placement.is_partial() for placement in spec.placements):
        return spec
    if writes:
        raise ValueError(
            f"{name_of(function)} cannot write into a tensor with placements {shown(spec.placements)}: redistribute it to "
            f"Shard or Replicate first"
        )
    return _reduced(spec)


def _reduced(spec: Spec) -> Spec:
    return make_spec(spec.mesh, [REPLICATE if p.is_partial() else p for p in spec.placements], spec.shape)


def _local(x: Any, spec: Spec | None, function: Any, index: int) -> Any:
    platform = get_platform()
    if isinstance(x, DTensorMethods):
        given = x._spec.shape
        if spec is None or x._spec.mesh != spec.mesh or not _fits(given, spec):
            first = "a plain tensor" if spec is None else f"a DTensor of {spec}"
            raise ValueError(
                f"{name_of(function)}: at index {index} the first list has {first}, another one a DTensor of {x._spec}: "
                f"lists must agree in shape and mesh at each index"
            )
        if not given:
            return _number(x, function, index)
        if x._spec is spec:
            return x._local
        return x.redistribute(placements=_beside(spec, given))._local
    if spec is None or not platform.is_tensor(x) or not x.shape:
        return x
    whole = all(placement.is_replicate() for placement in spec.placements)
    if whole and tuple(x.shape) == spec.shape and not platform.requires_grad(x):
        return x
    raise ValueError(
        f"{name_of(function)}: at index {index} a plain tensor of shape {tuple(x.shape)} meets a DTensor of {spec}: make it a "
        f"DTensor with distribute_tensor"
    )


def _fits(shape: tuple[int, ...], spec: Spec) -> bool:
    if shape in ((), spec.shape):
        return True
    can_broadcast = ragged_dim(spec.placements) is None and len(shape) <= len(spec.shape)
    return can_broadcast and all(n in (1, m) for n, m in zip(shape[::-1], spec.shape[::-1], strict=False))


def _beside(spec: Spec, shape: tuple[int, ...]) -> list[Placement]:
    """How a tensor of this shape, which broadcasts to that of ``spec``, lies beside one of ``spec``."""
    placements = []
    for placement in spec.placements:
        if isinstance(placement, Shard):
            dim = placement.dim - len(spec.shape) + len(shape)
            is_cut = dim >= 0 and shape[dim] == spec.shape[placement.dim]
            placement = replace(placement, dim=dim) if is_cut else REPLICATE
        placements.append(placement)
    return placements


def _number(x: Any, function: Any, name: Any) -> Any:
    """A number, or a tensor of one element that counts for all tensors."""
    platform = get_platform()
    if not platform.is_tensor(x):
        return x
    if math.prod(x.shape) != 1:
        raise ValueError(
            f"{name_of(function)}: argument {name} is a tensor of shape {tuple(x.shape)}: give one element"
        )
    if platform.is_grad_enabled() and platform.requires_grad(getattr(x, "_local", x)):
        raise ValueError(
            f"{name_of(function)}: argument {name} requires grad, which lists of DTensors do not record: multiply one by one"
        )
    return x.full_tensor() if isinstance(x, DTensorMethods) else x


# -------------------------------------------------------------------------------------------------------------- reductions
def norms(xs: Sequence[Any], p: float, local_norms: Callable[[list[Tensor]], list[Tensor]]) -> list[Any]:
    """The p-norm of each tensor, exactly that of the whole; DTensors that are Replicate, and plain tensors of plain ones.

    ``local_norms`` gives the norms of local tensors. They are reduced in float32 at least: a power of a norm in half precision
    would overflow. Communication: per mesh, dtype and mesh dim along which tensors are cut, one all-reduce of as many numbers.
    No gradient is recorded (ValueError where one would be).
    """
    platform = get_platform()
    specs = [_reduced(x._spec) if isinstance(x, DTensorMethods) else None for x in xs]
    local = [
        x if spec is None else _local(x, spec, norms, i)
        for i, (x, spec) in enumerate(zip(xs, specs, strict=True))
    ]
    if platform.is_grad_enabled() and any(map(platform.requires_grad, local)):
        raise ValueError(
            "norms of a list of DTensors record no gradient: take the norm of each, or use no_grad()"
        )
    if not all(platform.is_floating(x.dtype) for x in local):
        raise ValueError("norms of a list of DTensors take floating dtypes: cast, or take the norm of each")
    has = [0 not in x.shape or specs[i] is None for i, x in enumerate(local)]
    known = iter(local_norms([x for x, has_some in zip(local, has, strict=True) if has_some]))
    op, neutral = ("max", 0.0) if p == math.inf else ("min", math.inf) if p == -math.inf else ("sum", 0.0)
    is_power = op == "sum" and p != 0
    found: list[Tensor] = []
    for x, spec, has_some in zip(local, specs, has, strict=True):
        # By the dtype of the tensor: ranks that hold nothing must send the same.
        wide = platform.dtype("float32") if platform.itemsize(x.dtype) < 4 else x.dtype
        if not has_some:
            found.append(platform.full((), neutral, wide, platform.device_of(x)))
            continue
        norm = platform.cast(next(known), wide)
        found.append(norm**p if is_power and spec is not None else norm)
    for spec, mesh_dim, at in _cuts(specs, found):
        vector = platform.cat([platform.reshape(found[i], (1,)) for i in at])
        vector = collectives.all_reduce(vector, spec.mesh.get_group(mesh_dim), op)
        for place, i in enumerate(at):
            found[i] = platform.reshape(platform.narrow(vector, 0, place, 1), ())
    results = []
    for x, spec in zip(found, specs, strict=True):
        if spec is None:
            results.append(x)
            continue
        whole = x ** (1 / p) if is_power else x
        results.append(_wrap(whole, make_spec(spec.mesh, [REPLICATE] * len(spec.placements), ())))
    return results


def _cuts(specs: Sequence[Spec | None], values: Sequence[Tensor]) -> Iterator[tuple[Spec, int, list[int]]]:
    """A spec on each mesh, each mesh dim of it, and the indices of the tensors of one dtype that are cut along that."""
    groups: dict[tuple[int, int, str], tuple[Spec, list[int]]] = {}
    for i, spec in enumerate(specs):
        for mesh_dim, placement in enumerate(spec.placements if spec is not None else ()):
            assert spec is not None
            if spec.mesh.shape[mesh_dim] > 1 and not placement.is_replicate():
                key = (id(spec.mesh), mesh_dim, get_platform().dtype_name(values[i].dtype))
                groups.setdefault(key, (spec, []))[1].append(i)
    for (_, mesh_dim, _), (spec, at) in groups.items():
        yield spec, mesh_dim, at


def unscale(function: Any, grads: Sequence[Any], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply gradients by ``inv_scale``; ``found_inf`` becomes 1 on all ranks where one of them has a value that is not finite.

    Communication: per mesh and mesh dim one all-reduce (max) of one number.
    """
    platform = get_platform()
    elementwise(function, (grads, found_inf, inv_scale), {}, writes=True)
    meshes = {id(x._spec.mesh): x._spec.mesh for x in grads if isinstance(x, DTensorMethods)}
    value = found_inf
    for mesh in meshes.values():
        for mesh_dim, num_ranks in enumerate(mesh.shape):
            if num_ranks > 1:
                value = collectives.all_reduce(value, mesh.get_group(mesh_dim), "max")
    if value is not found_inf:
        platform.copy_(found_inf, value)
