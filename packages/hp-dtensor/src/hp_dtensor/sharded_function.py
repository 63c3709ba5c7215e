"""``custom_shard``: a function that is written for local tensors, called with DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.creation import check_mesh
from hp_dtensor.marks import mark, marked
from hp_dtensor.module_tensors import is_dtensor
from hp_dtensor.nest import rebuilt
from hp_dtensor.placements import Placement
from hp_dtensor.redistribution import joined_last, moves_between, run_moves
from hp_dtensor.sharding_plan import is_one_spec, read_wish
from hp_dtensor.spec import Spec, resolve, shown
from hp_platform import get_platform

Tensor = Any
_NEEDED = object()


def custom_shard(
    func: Callable[..., Any] | None = None,
    device_mesh: Any = None,
    out_placements: Any = _NEEDED,
    in_placements: Any = None,
    redistribute_inputs: bool = True,
    *,
    in_grad_placements: Any = None,
    out_shapes: Callable[..., Any] | None = None,
) -> Any:
    """A function of DTensors made of one that works on this rank's local tensors. All ranks of the mesh call it.

    ``func`` gets plain local tensors for the DTensors among its positional arguments, and its results become DTensors::

        @custom_shard(out_placements=[Shard(0)], in_placements=([Shard(0)], [Replicate()]))
        def scaled(x, scale):
            return x * scale

    Args:
        func: the function; None: a decorator is returned.
        device_mesh: default: that of the first DTensor among the arguments.
        out_placements: how the results lie: one spec for one result, a list of specs for several; None for what is no
            tensor. A spec is written as in :class:`hp_dtensor.ShardingPlan`. A result may be a Partial.
        in_placements: for each positional argument a spec, or None for what is no DTensor. None: there are no DTensors
            among them. Keyword arguments pass as they are.
        redistribute_inputs: whether DTensors that lie otherwise are redistributed (default), or refused.
        in_grad_placements: how the gradients lie that ``func``'s backward gives for its inputs, if not as usual. None, for
            all or for one argument: where an input is Replicate along a mesh dim and some result is not, each rank's gradient
            is a summand, and they are summed; else each rank's is the whole one (of a Shard: the whole one's shard). Give
            Partial() where ranks use a Replicate differently although all results are Replicate (as with an all-reduce
            inside of ``func``), and Replicate() where ``func`` sums the gradient itself.
        out_shapes: ``out_shapes(*args)`` with the arguments as given (DTensors have global shapes) returns the global shape
            of the result, or a list with one per result.

    Communication of a call: what redistribution needs, and, for results that are cut and without ``out_shapes``, one gather of
    their sizes per cutting mesh dim, for which the host waits. In backward one all-reduce per summed gradient and mesh dim.

    If no positional argument is a DTensor, ``func`` is called as it is and its results stay plain. Raises ValueError for
    another number of arguments or results than of specs, for specs that do not fit, DTensors of another mesh, and with
    ``redistribute_inputs=False`` for a DTensor that lies otherwise; TypeError for a DTensor without a spec, or a spec for
    what is no DTensor (no tensor, among the results); RuntimeError for a DTensor while ``in_placements`` is None.
    """
    if out_placements is _NEEDED:
        raise ValueError("custom_shard needs out_placements: how the results lie, None if there is no tensor")
    if device_mesh is not None:
        check_mesh(device_mesh)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(function):
            raise TypeError(f"custom_shard takes a function, got {type(function).__name__}")
        region = _Region(
            function,
            device_mesh,
            _several(out_placements, "out_placements"),
            None if in_placements is None else _per_argument(in_placements, "in_placements"),
            redistribute_inputs,
            None if in_grad_placements is None else _per_argument(in_grad_placements, "in_grad_placements"),
            out_shapes,
        )
        given, grads = region.in_placements, region.in_grad_placements
        if grads is not None and (given is None or len(grads) != len(given)):
            raise ValueError(
                f"in_grad_placements has {len(grads)} entries, in_placements {0 if given is None else len(given)}: give one "
                f"per argument, None for the usual"
            )

        @functools.wraps(function)
        def sharded(*args: Any, **kwargs: Any) -> Any:
            return region.call(args, kwargs)

        return sharded

    return decorate if func is None else decorate(func)


def _several(value: Any, what: str) -> tuple[Any, ...]:
    if value is None or is_one_spec(value):
        return (value,)
    if isinstance(value, (list, tuple)):
        return tuple(value)
    raise ValueError(f"{what} takes a spec such as [Shard(0)], a list of specs, or None, got {value!r}")


def _per_argument(value: Any, what: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{what} takes a list with a spec or None per positional argument, got {value!r}")
    return tuple(value)


@dataclass(frozen=True)
class _Region:
    """What :func:`custom_shard` was told."""

    function: Callable[..., Any]
    mesh: Any
    out_placements: tuple[Any, ...]
    in_placements: tuple[Any, ...] | None
    redistributes: bool
    in_grad_placements: tuple[Any, ...] | None
    out_shapes: Callable[..., Any] | None

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtensors = [i for i, arg in enumerate(args) if is_dtensor(arg)]
        given, name = self.in_placements, self._name
        if given is not None and len(given) != len(args):
            raise ValueError(
                f"{name} got {len(args)} positional arguments for in_placements of {len(given)}: give one spec per argument, "
                f"None for those that are no DTensors"
            )
        if dtensors and given is None:
            raise RuntimeError(
                f"argument {dtensors[0]} of {name} is a DTensor, but in_placements is None: say how {name} wants it"
            )
        if not dtensors:
            self._check_no_specs(args)
            return self.function(*args, **kwargs)
        mesh = args[dtensors[0]].device_mesh if self.mesh is None else self.mesh
        differing = self._differing(mesh)
        local = [self._local(i, arg, mesh, differing) for i, arg in enumerate(args)]
        return self._wrapped(self.function(*local, **kwargs), mesh, args)

    @property
    def _name(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))

    def _check_no_specs(self, args: tuple[Any, ...]) -> None:
        # A plain tensor in the place of every DTensor is a call of the function on its own; anything else has no spec.
        platform = get_platform()
        for i, (arg, spec) in enumerate(zip(args, self.in_placements or (), strict=False)):
            if spec is not None and not platform.is_tensor(arg):
                raise TypeError(self._no_dtensor(i, arg, spec))

    def _no_dtensor(self, i: int, arg: Any, spec: Any) -> str:
        return (
            f"argument {i} of {self._name} has the spec {spec!r}, but is no DTensor, {type(arg).__name__}: make it one, or "
            f"give None"
        )

    def _differing(self, mesh: Any) -> frozenset[int]:
        """Mesh dims along which some result is not the same on all ranks."""
        found: set[int] = set()
        for i, spec in enumerate(self.out_placements):
            if spec is not None:
                placements = read_wish(spec, mesh, f"out_placements[{i}] of {self._name}").placements
                found = found | {dim for dim, p in enumerate(placements) if not p.is_replicate()}
        return frozenset(dim for dim in found if mesh.shape[dim] > 1)

    # ---------------------------------------------------------------------------------------------------------- arguments
    def _local(self, i: int, arg: Any, mesh: Any, differing: frozenset[int]) -> Any:
        assert self.in_placements is not None
        spec, what = self.in_placements[i], f"argument {i} of {self._name}"
        if not is_dtensor(arg):
            if spec is not None:
                raise TypeError(self._no_dtensor(i, arg, spec))
            return arg
        if spec is None:
            raise TypeError(f"{what} is a DTensor, but its entry in in_placements is None: give it a spec")
        if arg.device_mesh != mesh:
            raise ValueError(f"{what} lies on {arg.device_mesh}, the function works on {mesh}")
        # Of the tensor's own mesh, which may be another object than an equal one that was given.
        wanted = read_wish(spec, arg.device_mesh, f"in_placements[{i}] of {self._name}")
        target = wanted.spec_for(arg.shape, what)
        if target is not arg._spec and not self.redistributes:
            raise ValueError(
                f"{what} is {arg._spec}, but the function wants {shown(target.placements)}: redistribute it, or let "
                f"redistribute_inputs be True"
            )
        asked = None if self.in_grad_placements is None else self.in_grad_placements[i]
        if asked is not None:
            asked_wish = read_wish(asked, arg.device_mesh, f"in_grad_placements[{i}] of {self._name}")
            differing = _given_as_sums(target, asked_wish.placements, what)
        return local_where_used(arg, target, differing)

    # ------------------------------------------------------------------------------------------------------------ results
    def _wrapped(self, result: Any, mesh: Any, args: tuple[Any, ...]) -> Any:
        is_many = isinstance(result, (list, tuple))
        values = list(result) if is_many else [result]
        if len(values) != len(self.out_placements):
            raise ValueError(
                f"{self._name} gave {len(values)} results for {len(self.out_placements)} out_placements: give one per result, "
                f"None for what is no tensor"
            )
        shapes: Sequence[Any] = [None] * len(values)
        if self.out_shapes is not None:
            told = self.out_shapes(*args)
            shapes = list(told) if is_many else [told]
            if len(shapes) != len(values):
                raise ValueError(
                    f"out_shapes of {self._name} gave {len(shapes)} shapes for {len(values)} results"
                )
        values = [
            self._wrapped_one(i, x, spec, mesh, shape)
            for i, (x, spec, shape) in enumerate(zip(values, self.out_placements, shapes, strict=True))
        ]
        return rebuilt(result, values) if is_many else values[0]

    def _wrapped_one(self, i: int, x: Any, spec: Any, mesh: Any, shape: Any) -> Any:
        from hp_dtensor.native import DTensor

        what = f"result {i} of {self._name}"
        is_tensor = get_platform().is_tensor(x)
        if spec is None:
            if is_tensor:
                raise TypeError(
                    f"{what} is a tensor, but its entry in out_placements is None: say how it lies"
                )
            return x
        if not is_tensor:
            raise TypeError(f"{what} has the spec {spec!r}, but is no tensor, {type(x).__name__}: give None")
        wish = read_wish(spec, mesh, f"out_placements[{i}] of {self._name}")
        if wish.ndim is not None and wish.ndim != x.ndim:
            raise ValueError(f"{what} has {x.ndim} dims, its spec {spec!r} names {wish.ndim}")
        try:
            return DTensor.from_local(x, mesh, wish.placements, shape=shape)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from error


def _given_as_sums(spec: Spec, given: Sequence[Placement], what: str) -> frozenset[int]:
    """Mesh dims along which the gradient of an input comes in summands. ValueError for what cannot be."""
    found = []
    pairs = zip(
        spec.placements, spec.grad.placements, resolve(spec.mesh, given, len(spec.shape)), strict=True
    )
    for dim, (own, usual, grad) in enumerate(pairs):
        if own.is_replicate() and grad.is_partial("sum"):
            found.append(dim)
        elif grad != usual:
            raise ValueError(
                f"in_grad_placements: the gradient of {what}, {own} along mesh dim {dim}, is {usual}"
                + (", or Partial('sum')" if own.is_replicate() else "")
                + f", not {grad}"
            )
    return frozenset(dim for dim in found if spec.mesh.shape[dim] > 1)


def local_where_used(x: Any, target: Spec, differing: frozenset[int]) -> Tensor:
    """The local tensor of the DTensor ``x``, redistributed to ``target``, for use that differs along these mesh dims.

    Differentiable: see [Note: how gradients are counted] in :mod:`hp_dtensor.conversions`. Where a Shard is gathered to be
    used differently, the gradient takes one reduce-scatter.
    """
    differs = tuple(dim for dim in sorted(differing) if target.placements[dim].is_replicate())
    if target is x._spec:
        return marked(x, differs) if differs else x._local
    moves = moves_between(x._spec, target)
    varying = joined_last(moves) & frozenset(differs)
    local = run_moves(x._local, x._spec, moves, varying)
    rest = tuple(dim for dim in differs if dim not in varying)
    return mark(local, x._spec, rest) if rest else local
