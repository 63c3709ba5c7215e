"""Convolutions: functions of mint with the arguments of the rules, and objects with attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
from mindspore import ops

from hp_dtensor._mindspore.composed.convolution import convolution
from hp_dtensor._mindspore.spelling import Operation, is_on_cpu, spelling


def _of_function(count: int) -> None:
    @spelling(f"conv{count}d", f"Conv{count}DExt", f"Conv{count}DPadding")
    def read(
        operation: Operation,
        x: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        run = operation.native_or(convolution)
        return operation.follow(
            f"conv{count}d", run, x, weight, bias, _whole(stride), _whole(padding), _whole(dilation), groups
        )


for _count in (1, 2, 3):
    _of_function(_count)


def _of_object(
    count: int, primitive: str, strides: str, dilations: str, function: Callable[..., Any]
) -> None:
    @spelling(f"conv{count}d", primitive)
    def read(operation: Operation, x: Any, weight: Any) -> Any:
        given = operation.attributes.attrs
        stride, dilation = (tuple(given[name])[-count:] for name in (strides, dilations))
        pairs = _pairs(given, tuple(x.shape[2:]), tuple(weight.shape[2:]), stride, dilation)
        padding = tuple(before for before, _ in pairs)
        if any(before != after for before, after in pairs):
            ends = tuple(n for pair in reversed(pairs) for n in pair)
            x, padding = operation.follow("pad", ops.pad, x, ends), (0,) * count

        def local(own: Any, own_weight: Any, bias: Any, *rest: Any) -> Any:
            if is_on_cpu(own) and own.dtype == mindspore.float64:
                return convolution(own, own_weight, bias, *rest)
            stride, padding, dilation, groups = rest
            # A new object: the one that was called knows how many channels the whole has.
            return function(own, own_weight, bias, stride, "pad", padding, dilation, groups)

        return operation.follow(
            f"conv{count}d", local, x, weight, None, stride, padding, dilation, given["groups"]
        )


_of_object(2, "Conv2D", "stride", "dilation", ops.conv2d)
_of_object(3, "Conv3D", "strides", "dilations", ops.conv3d)


def _pairs(
    given: Any, places: tuple[int, ...], kernel: tuple[int, ...], stride: Any, dilation: Any
) -> list[tuple[int, int]]:
    """How much is put before and after each place dim."""
    mode = given["pad_mode"]
    if mode == "valid":
        return [(0, 0)] * len(places)
    if mode == "pad":
        pads = given["pad"]
        return [(pads[2 * i], pads[2 * i + 1]) for i in range(len(places))]
    pairs = []
    for n, k, step, far in zip(places, kernel, stride, dilation, strict=True):
        more = max((-(-n // step) - 1) * step + far * (k - 1) + 1 - n, 0)
        pairs.append((more // 2, more - more // 2))
    return pairs


def _whole(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
