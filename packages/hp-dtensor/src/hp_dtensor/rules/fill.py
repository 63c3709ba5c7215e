"""A whole tensor written: in place by fill_, zero_, copy_, where the target stays as it lies, and fill anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hp_dtensor.placements import REPLICATE, Placement, Shard
from hp_dtensor.rules.registry import Outcome, Placements, rule
from hp_dtensor.rules.writes import stretches
from hp_dtensor.spec import Spec


def _value_lies(x: Spec, value: Spec) -> Placements:
    """Cut as the target along dims that both have, a summand of a sum, else whole."""
    if len(value.shape) > len(x.shape) or not stretches(value.shape, x.shape):
        raise ValueError(f"a value of shape {value.shape} does not fit a tensor of shape {x.shape}")
    shift = len(value.shape) - len(x.shape)
    lies: list[Placement] = []
    for p in x.placements:
        if isinstance(p, Shard):
            at = p.dim + shift
            lies.append(replace(p, dim=at) if at >= 0 and value.shape[at] == x.shape[p.dim] else REPLICATE)
        else:
            lies.append(p)
    return tuple(lies)


@rule("copy_", params=("input", "src"), in_place=True)
def copy_(x: Any, src: Any, non_blocking: bool = False) -> Outcome:
    """The values of another tensor, in whatever placements; a plain one is whole, and every rank takes its part."""
    if not isinstance(src, Spec):
        raise ValueError(f"copy_ takes a tensor, got {src!r}: use fill_() for a number")
    return Outcome((x.placements, _value_lies(x, src)), x.placements, x.shape)


@rule("fill_", params=("input", "value"), in_place=True, by_value=False)
def fill_(x: Any, value: Any) -> Outcome:
    """One value everywhere."""
    if isinstance(value, Spec):
        if value.shape:
            raise ValueError(f"fill_ takes a number or a 0-d tensor, got shape {value.shape}: use copy_()")
        return Outcome((x.placements, _value_lies(x, value)), x.placements, x.shape)
    zeros = any(c and p.is_partial("sum") for p, c in zip(x.placements, x.mesh.get_coordinate(), strict=True))

    def around(kernel: Callable[..., Any]) -> Callable[..., Any]:
        # Of a sum, one rank holds the value.
        return lambda local, _: kernel(local, 0)

    return Outcome((x.placements,), x.placements, x.shape, around=around if zeros else None)


@rule("fill", params=("input", "value"))
def fill(x: Any, value: Any) -> Outcome:
    """One value everywhere, in a new tensor that is cut as ``x``. Linear in the value; that of ``x`` does not count."""
    if not isinstance(value, Spec):
        return Outcome((), tuple(p if isinstance(p, Shard) else REPLICATE for p in x.placements), x.shape)
    if value.shape:
        raise ValueError(f"fill takes a number or a 0-d tensor, got shape {value.shape}")
    pairs = list(zip(x.placements, value.placements, strict=True))
    of_value = tuple(REPLICATE if isinstance(p, Shard) else own for p, own in pairs)
    output = tuple(p if isinstance(p, Shard) else own for p, own in pairs)
    return Outcome((None, of_value), output, x.shape)


@rule("zero_", params=("input",), in_place=True)
def zero_(x: Any) -> Outcome:
    """Zeros everywhere."""
    return Outcome((x.placements,), x.placements, x.shape)
