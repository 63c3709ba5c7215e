"""``x[...] = value``: the target stays as it lies, and every rank writes what falls into its piece.

The value is brought to where it is needed: cut as the target is where it has the same dim, whole elsewhere. Where a rank has
nothing to write it writes nothing, but by the same operation: the backward of all others waits for its share of the value's
gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor.placements import REPLICATE, Partial
from hp_dtensor.rules.refusals import checked
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.rules.subscript import Template, entry_kind, normalised, parsed
from hp_dtensor.rules.writes import Write
from hp_dtensor.spec import Spec, make_spec
from hp_platform import get_platform

Tensor = Any


@rule("setitem", params=("input", "index", "value"), normalise=normalised, in_place=True)
def setitem(x: Any, template: Template, value: Any, *tensors: Any) -> Outcome:
    """Write into part of a tensor."""
    write = Write(x, parsed(x, template, tensors), tensors, value)

    def around(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(local: Tensor, _: Any, given: Any, *at: Tensor) -> Any:
            platform: Any = get_platform()
            index, values = write.of_rank(local, given, at)
            names_places = any(platform.is_tensor(i) and 0 not in i.shape for i in index)
            if 0 in local.shape and not (names_places or _has_gradient(values)):
                return local
            return kernel(local, tuple(index), values)

        return run

    return Outcome(
        (x.placements, None, write.value_lies, *write.tensors_lie), x.placements, x.shape, around=around
    )


def _tensors_last(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x, indices, values, *rest = args
    if isinstance(indices, Template):
        return args, kwargs
    if not isinstance(indices, (list, tuple)):
        raise ValueError(f"indices must be a tuple of tensors, got {type(indices).__name__}")
    template = Template(tuple(entry_kind(t) for t in indices))
    accumulate = bool(rest[0]) if rest else False
    return (x, template, values, accumulate, *indices), kwargs


@rule("index_put", params=("input", "indices", "values", ("accumulate", False)), normalise=_tensors_last)
def index_put(x: Any, template: Template, values: Any, accumulate: bool, *tensors: Any) -> Outcome:
    """Values written, or added, at the places that tensors name. To a sum every rank may add its part of the values."""
    if not isinstance(values, Spec):
        raise ValueError(f"values must be a tensor, got {values!r}")
    target = x
    if accumulate:
        # A maximum plus something is not the maximum of the pieces plus something.
        linear = [REPLICATE if isinstance(p, Partial) and not p.is_linear else p for p in x.placements]
        target = make_spec(x.mesh, linear, x.shape)
    write = Write(target, parsed(x, template, tensors), tensors, values, natively=False, adds=accumulate)

    def around(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(local: Tensor, _: Any, given: Any, adds: bool, *at: Tensor) -> Any:
            index, own = write.of_rank(local, given, at)
            return kernel(local, tuple(i for i in index if not isinstance(i, slice)), own, adds)

        return run

    inputs = (target.placements, None, write.value_lies, None, *write.tensors_lie)
    outcome = Outcome(inputs, target.placements, x.shape, around=around)
    if write.found.has_masks:
        return outcome
    return checked(outcome, {i + 4: x.shape[d] for i, d in enumerate(write.found.indexed)}, from_end=True)


def _has_gradient(value: Any) -> bool:
    platform = get_platform()
    return platform.is_tensor(value) and platform.requires_grad(value)
