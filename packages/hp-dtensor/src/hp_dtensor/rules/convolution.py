"""Convolutions: cut along batches, channels of the output and (leaving a sum) channels of the input.

Places are joined where a kernel reaches from one to another; those of dims with a kernel of size 1 stay as they are cut.

Grouped ones are cut along whole groups, so that a depthwise convolution is cut along its channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.rules.labels import (
    Labelled,
    Labels,
    Operand,
    Role,
    contracts_nothing,
    labelled,
    local_shape,
    zeros_of_product,
)
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.spec import Spec
from hp_platform import get_platform

GROUPS = 6
"""The position of this argument, which is another number on each rank."""


def each(value: Any, count: int, name: str) -> tuple[Any, ...]:
    """One number per place dim, where one may stand for all."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if len(values) not in (1, count):
        raise ValueError(f"{name} is {value!r}: give one number, or {count}")
    return values if len(values) == count else values * count


def _sizes(
    places: tuple[int, ...], kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any
) -> tuple[int, ...]:
    count = len(places)
    if padding == "same":
        return places
    pads = each(0 if padding == "valid" else padding, count, "padding")
    rows = zip(
        places, kernel, each(stride, count, "stride"), pads, each(dilation, count, "dilation"), strict=True
    )
    return tuple((n + 2 * pad - far * (k - 1) - 1) // step + 1 for n, k, step, pad, far in rows)


def _transposed_sizes(
    places: tuple[int, ...], kernel: tuple[int, ...], stride: Any, padding: Any, more: Any, dilation: Any
) -> tuple[int, ...]:
    count = len(places)
    rows = zip(
        places,
        kernel,
        each(stride, count, "stride"),
        each(padding, count, "padding"),
        each(more, count, "output_padding"),
        each(dilation, count, "dilation"),
        strict=True,
    )
    return tuple((n - 1) * step - 2 * pad + far * (k - 1) + end + 1 for n, k, step, pad, end, far in rows)


def _convolved(
    x: Spec,
    weight: Spec,
    bias: Spec | None,
    groups: int,
    places: tuple[int, ...],
    alone: Sequence[bool],
    is_transposed: bool,
) -> Outcome:
    at = len(x.shape) - len(places) - 1
    per_group = weight.shape[1]
    channels, out = (
        (weight.shape[0], per_group * groups) if is_transposed else (per_group * groups, weight.shape[0])
    )
    if x.shape[at] != channels:
        raise ValueError(
            f"a weight of shape {weight.shape} in {groups} groups needs {channels} channels, got {x.shape[at]}"
        )
    batch: Labels = ("batch",) * at
    rest: Labels = tuple(f"place {i}" if one else "" for i, one in enumerate(alone))
    kernel: Labels = ("",) * len(places)
    if groups == 1:
        of_x, of_out = "in", "out"
        of_weight: Labels = ("in", "out") if is_transposed else ("out", "in")
    else:
        of_x, of_out, of_weight = "group", "group", ("group", "")
    operands = [Operand(0, x, (*batch, of_x, *rest)), Operand(1, weight, (*of_weight, *kernel))]
    if bias is not None:
        operands.append(Operand(2, bias, (of_out,), Role.SUMMAND))
    results = [Labelled((*batch, of_out, *rest), (*x.shape[:at], out, *places))]
    found = labelled(operands, results, evenly={"group": groups})
    assert found.output is not None
    shape = local_shape(x, found.output, results[0].shape)
    if 0 in shape or contracts_nothing(operands, results, found):
        return replace(found, run=_of_nothing(shape, at))
    own = local_shape(x, found.inputs[0])[at]
    return found if groups == 1 else replace(found, replaced={GROUPS: groups * own // channels})


def _alone(kernel: tuple[int, ...], stride: Any, *pads: Any) -> list[bool]:
    """Of each dim, whether the results at a place need that place alone, and lie where it does."""
    rows = [each(pad, len(kernel), "padding") for pad in pads]
    return [
        k == step == 1 and not any(row[i] for row in rows)
        for i, (k, step) in enumerate(zip(kernel, each(stride, len(kernel), "stride"), strict=True))
    ]


def _of_nothing(shape: tuple[int, ...], at: int) -> Callable[..., Any]:
    """See [Note: empty pieces] in hp_dtensor.no_elements: kernels refuse no channels."""

    def run(x: Any, weight: Any, bias: Any = None, *_: Any) -> Any:
        zeros = zeros_of_product(shape, [x, weight])
        if bias is None:
            return zeros
        platform = get_platform()
        column = platform.reshape(bias, (-1, *(1 for _ in shape[at + 1 :])))
        return zeros + platform.cast(column, zeros.dtype)  # which autocast may say

    return run


def _check(name: str, count: int, x: Any, weight: Any) -> None:
    if not (isinstance(x, Spec) and isinstance(weight, Spec)):
        raise ValueError(f"{name} takes tensors for its input and weight")
    if len(weight.shape) != count + 2 or len(x.shape) not in (count + 1, count + 2):
        raise ValueError(
            f"{name} takes an input with {count + 1} or {count + 2} dims and a weight with {count + 2}, got shapes {x.shape} and "
            f"{weight.shape}"
        )


def _enter(count: int) -> None:
    name = f"conv{count}d"

    def convolution(
        x: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Outcome:
        _check(name, count, x, weight)
        places = _sizes(x.shape[-count:], weight.shape[2:], stride, padding, dilation)
        pads = 0 if padding in ("valid", "same") else padding
        alone = _alone(weight.shape[2:], stride, pads)
        return _convolved(x, weight, bias, groups, places, alone, is_transposed=False)

    def transposed(
        x: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Outcome:
        _check(f"conv_transpose{count}d", count, x, weight)
        places = _transposed_sizes(
            x.shape[-count:], weight.shape[2:], stride, padding, output_padding, dilation
        )
        alone = _alone(weight.shape[2:], stride, padding, output_padding)
        return _convolved(x, weight, bias, groups, places, alone, is_transposed=True)

    convolution.__doc__ = f"{name}: input (..., in, places), weight (out, in / groups, kernel)."
    transposed.__doc__ = (
        f"conv_transpose{count}d: input (..., in, places), weight (in, out / groups, kernel)."
    )
    shared = ("input", "weight", ("bias", None), ("stride", 1), ("padding", 0))
    rule(name, params=(*shared, ("dilation", 1), ("groups", 1)))(convolution)
    rule(f"conv_transpose{count}d", params=(*shared, ("output_padding", 0), ("groups", 1), ("dilation", 1)))(
        transposed
    )


for _count in (1, 2, 3):
    _enter(_count)
