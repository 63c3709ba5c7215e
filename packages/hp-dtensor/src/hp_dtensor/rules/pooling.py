"""Pooling and resampling: cut along batches and channels; places are joined. Averages and resampling are linear."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hp_dtensor.no_elements import zeros_from
from hp_dtensor.rules.convolution import each
from hp_dtensor.rules.labels import Labelled, Labels, Operand, Role, labelled, local_shape, numbered
from hp_dtensor.rules.refusals import mean_of_sums
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.spec import Spec
from hp_platform import get_platform


def _resized(x: Spec, places: tuple[int, ...], *, is_linear: bool, num_results: int = 1) -> Outcome:
    at = len(x.shape) - len(places)
    labels: Labels = (*numbered("batch", at), *("",) * len(places))
    results = [Labelled(labels, (*x.shape[:at], *places))] * num_results
    found = labelled([Operand(0, x, labels, Role.FACTOR if is_linear else Role.PLAIN)], results)
    shape = local_shape(x, found.inputs[0], results[0].shape)
    if 0 not in shape:
        return found

    def run(local: Any, *_: Any, **__: Any) -> Any:
        # See [Note: empty pieces] in hp_dtensor.no_elements: kernels refuse no channels.
        platform = get_platform()
        device = platform.device_of(local)
        values = zeros_from(platform.zeros(shape, local.dtype, device), [local])
        return values if num_results == 1 else (values, platform.zeros(shape, "int64", device))

    return replace(found, run=run)


def _places(x: Any, count: int, name: str) -> tuple[int, ...]:
    if not isinstance(x, Spec) or len(x.shape) not in (count + 1, count + 2):
        raise ValueError(f"{name} takes a tensor with {count + 1} or {count + 2} dims, got {x}")
    return x.shape[-count:]


def _pooled(
    sizes: tuple[int, ...], kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> tuple[int, ...]:
    count = len(sizes)
    kernels = each(kernel, count, "kernel_size")
    steps = kernels if stride is None or stride == () else each(stride, count, "stride")
    pads, far = each(padding, count, "padding"), each(dilation, count, "dilation")
    found = []
    for n, k, step, pad, d in zip(sizes, kernels, steps, pads, far, strict=True):
        span = n + 2 * pad - d * (k - 1) - 1
        length = (-(-span // step) if ceil_mode else span // step) + 1
        if ceil_mode and (length - 1) * step >= n + pad:
            length = length - 1  # a window must begin inside, or in the padding in front
        found.append(length)
    return tuple(found)


def _enter(count: int) -> None:
    def average(
        x: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        *rest: Any,
        **_: Any,
    ) -> Outcome:
        sizes = _places(x, count, f"avg_pool{count}d")
        places = _pooled(sizes, kernel_size, stride, padding, 1, ceil_mode)
        return mean_of_sums(_resized(x, places, is_linear=True))

    def largest(num_results: int) -> Callable[..., Outcome]:
        def plan(
            x: Any,
            kernel_size: Any,
            stride: Any = None,
            padding: Any = 0,
            dilation: Any = 1,
            ceil_mode: bool = False,
            return_indices: bool = False,
        ) -> Outcome:
            sizes = _places(x, count, f"max_pool{count}d")
            places = _pooled(sizes, kernel_size, stride, padding, dilation, ceil_mode)
            return _resized(x, places, is_linear=False, num_results=num_results)

        plan.__doc__ = f"max_pool{count}d" + (", with the places of the largest." if num_results > 1 else ".")
        return plan

    def adaptive(is_linear: bool, num_results: int) -> Callable[..., Outcome]:
        def plan(x: Any, output_size: Any, return_indices: bool = False) -> Outcome:
            sizes = _places(x, count, f"adaptive pooling in {count} dims")
            wanted = each(output_size, count, "output_size")
            places = tuple(n if size is None else size for n, size in zip(sizes, wanted, strict=True))
            return _resized(x, places, is_linear=is_linear, num_results=num_results)

        plan.__doc__ = f"Pooling in {count} dims to a given size."
        return plan

    average.__doc__ = f"avg_pool{count}d, with any counting of the padding."
    window = ("input", "kernel_size", ("stride", None), ("padding", 0))
    rule(f"avg_pool{count}d", params=(*window, ("ceil_mode", False), ("count_include_pad", True)))(average)
    of_largest = (*window, ("dilation", 1), ("ceil_mode", False))
    rule(f"max_pool{count}d", params=of_largest)(largest(1))
    rule(f"max_pool{count}d_with_indices", params=of_largest)(largest(2))
    rule(f"adaptive_avg_pool{count}d", params=("input", "output_size"))(adaptive(True, 1))
    rule(f"adaptive_max_pool{count}d", params=("input", "output_size"))(adaptive(False, 1))
    rule(f"adaptive_max_pool{count}d_with_indices", params=("input", "output_size"))(adaptive(False, 2))


for _count in (1, 2, 3):
    _enter(_count)


@rule("interpolate", params=("input", ("size", None), ("scale_factor", None), ("mode", "nearest")))
def interpolate(
    x: Any, size: Any = None, scale_factor: Any = None, mode: str = "nearest", *rest: Any, **_: Any
) -> Outcome:
    """Resampling of places: input (batch, channels, places), to ``size`` or by ``scale_factor``."""
    if not isinstance(x, Spec) or len(x.shape) < 3:
        raise ValueError(f"interpolate takes a tensor (batch, channels, places), got {x}")
    sizes = x.shape[2:]
    if (size is None) == (scale_factor is None):
        raise ValueError("interpolate needs either size or scale_factor")
    if size is not None:
        places = each(size, len(sizes), "size")
    else:
        factors = each(scale_factor, len(sizes), "scale_factor")
        places = tuple(math.floor(n * factor) for n, factor in zip(sizes, factors, strict=True))
    return _resized(x, places, is_linear=True)
