"""Places of images that move, by batches and channels: pixel shuffles, patches, sampling at points, grids, unpooling.

Places are joined, but where pixel shuffles find them cut evenly. Channels stay cut where a cut falls between the groups that an
operation makes of them. All are linear in the image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.no_elements import zeros_from
from hp_dtensor.rules.convolution import each
from hp_dtensor.rules.labels import Labelled, Labels, Operand, Role, labelled, lies, local_shape, numbered
from hp_dtensor.rules.registry import EVERY_KIND, Outcome, rule
from hp_dtensor.spec import Spec
from hp_platform import get_platform


def linear_in_first(
    operands: Sequence[Operand], result: Labelled, evenly: Mapping[str, int] | None = None
) -> Outcome:
    """:func:`labelled`, but that kernels, which refuse no batch and no channels, are not asked about pieces without elements."""
    found = labelled(operands, [result], evenly=evenly)
    assert found.output is not None
    shape = local_shape(operands[0].spec, found.output, result.shape)
    places = [operand.place for operand in operands if isinstance(operand.place, int)]
    if 0 not in shape and all(0 not in local_shape(o.spec, lies(o, found)) for o in operands):
        return found

    def run(*local: Any, **_: Any) -> Any:
        # See [Note: empty pieces] in hp_dtensor.no_elements.
        platform = get_platform()
        inputs = [local[place] for place in places]
        zeros = platform.zeros(shape, inputs[0].dtype, platform.device_of(inputs[0]))
        return zeros_from(zeros, inputs)

    return replace(found, run=run)


def _image(x: Any, name: str, at_least: int = 3, at_most: int | None = None) -> None:
    ndim = len(x.shape) if isinstance(x, Spec) else -1
    if ndim < at_least or (at_most is not None and ndim > at_most):
        wanted = f"{at_least} or more" if at_most is None else f"{at_least} to {at_most}"
        raise ValueError(f"{name} takes a tensor (batch, channels, places) with {wanted} dims, got {x}")


def _positive(n: Any, what: str) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"{what} is a whole number above 0, got {n!r}")
    return n


# ----------------------------------------------------------------------------------------------------------------- pixels
@rule("pixel_shuffle", params=("input", "upscale_factor"), carries=EVERY_KIND)
def pixel_shuffle(x: Any, upscale_factor: int) -> Outcome:
    """``(..., c r^2, h, w)`` to ``(..., c, h r, w r)``."""
    _image(x, "pixel_shuffle")
    r = _positive(upscale_factor, "upscale_factor")
    *batch, channels, height, width = x.shape
    if channels % (r * r):
        raise ValueError(f"pixel_shuffle by {r} needs channels in groups of {r * r}, got shape {x.shape}")
    labels: Labels = (*numbered("batch", len(batch)), "channel", "row", "column")
    result = Labelled(labels, (*batch, channels // (r * r), height * r, width * r))
    evenly = {"channel": channels // (r * r), "row": height, "column": width}
    return linear_in_first([Operand(0, x, labels)], result, evenly)


@rule("pixel_unshuffle", params=("input", "downscale_factor"), carries=EVERY_KIND)
def pixel_unshuffle(x: Any, downscale_factor: int) -> Outcome:
    """``(..., c, h r, w r)`` to ``(..., c r^2, h, w)``."""
    _image(x, "pixel_unshuffle")
    r = _positive(downscale_factor, "downscale_factor")
    *batch, channels, height, width = x.shape
    if height % r or width % r:
        raise ValueError(f"pixel_unshuffle by {r} needs places that {r} divides, got shape {x.shape}")
    labels: Labels = (*numbered("batch", len(batch)), "channel", "row", "column")
    result = Labelled(labels, (*batch, channels * r * r, height // r, width // r))
    evenly = {"channel": channels, "row": height // r, "column": width // r}
    return linear_in_first([Operand(0, x, labels)], result, evenly)


@rule("channel_shuffle", params=("input", "groups"), carries=EVERY_KIND)
def channel_shuffle(x: Any, groups: int) -> Outcome:
    """Channels dealt anew: they are joined first, the other dims stay as they are cut."""
    _image(x, "channel_shuffle")
    if x.shape[1] % _positive(groups, "groups"):
        raise ValueError(f"channel_shuffle in {groups} groups: they do not divide the channels of {x.shape}")
    labels: Labels = ("batch", "", *numbered("place", len(x.shape) - 2))
    return linear_in_first([Operand(0, x, labels)], Labelled(labels, x.shape))


# ---------------------------------------------------------------------------------------------------------------- patches
def _num_patches(sizes: Sequence[int], kernel: Any, dilation: Any, padding: Any, stride: Any) -> int:
    rows = zip(
        sizes,
        each(kernel, 2, "kernel_size"),
        each(dilation, 2, "dilation"),
        each(padding, 2, "padding"),
        each(stride, 2, "stride"),
        strict=True,
    )
    return math.prod((n + 2 * pad - far * (k - 1) - 1) // step + 1 for n, k, far, pad, step in rows)


@rule(
    "im2col",
    params=("input", "kernel_size", ("dilation", 1), ("padding", 0), ("stride", 1)),
    carries=EVERY_KIND,
)
def im2col(x: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Outcome:
    """unfold of nn.functional: ``(n, c, h, w)`` to the patches ``(n, c k, number)``, k places in a patch."""
    _image(x, "unfold", 3, 4)
    *batch, channels, height, width = x.shape
    count = _num_patches((height, width), kernel_size, dilation, padding, stride)
    if count < 1:
        raise ValueError(f"unfold: the places of {x.shape} hold no patch of size {kernel_size}")
    first = numbered("batch", len(batch))
    places = math.prod(each(kernel_size, 2, "kernel_size"))
    result = Labelled((*first, "channel", ""), (*batch, channels * places, count))
    return linear_in_first([Operand(0, x, (*first, "channel", "", ""))], result, {"channel": channels})


@rule(
    "col2im", params=("input", "output_size", "kernel_size", ("dilation", 1), ("padding", 0), ("stride", 1))
)
def col2im(
    x: Any, output_size: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> Outcome:
    """fold of nn.functional: the patches ``(n, c k, number)``, added up into ``(n, c, h, w)``."""
    _image(x, "fold", 2, 3)
    *batch, columns, count = x.shape
    sizes, places = each(output_size, 2, "output_size"), math.prod(each(kernel_size, 2, "kernel_size"))
    wanted = _num_patches(sizes, kernel_size, dilation, padding, stride)
    if columns % places or count != wanted:
        raise ValueError(
            f"fold to {sizes} takes (n, channels times {places}, {wanted} patches), got shape {x.shape}"
        )
    first = numbered("batch", len(batch))
    channels = columns // places
    result = Labelled((*first, "channel", "", ""), (*batch, channels, *sizes))
    return linear_in_first([Operand(0, x, (*first, "channel", ""))], result, {"channel": channels})


# ------------------------------------------------------------------------------------------------------ points and places
@rule(
    "grid_sampler",
    params=("input", "grid", ("interpolation_mode", 0), ("padding_mode", 0), ("align_corners", False)),
)
def grid_sampler(x: Any, grid: Any, *options: Any) -> Outcome:
    """grid_sample: ``(n, c, places)`` at the points ``(n, new places, 2 or 3)``. Batches, channels and points may be cut."""
    _image(x, "grid_sample", 4, 5)
    count = len(x.shape) - 2
    if not isinstance(grid, Spec) or len(grid.shape) != count + 2 or grid.shape[-1] != count:
        raise ValueError(f"the grid of a tensor {x} is (batch, {count} dims of places, {count}), got {grid}")
    if grid.shape[0] != x.shape[0]:
        raise ValueError(f"grid_sample of {x.shape[0]} images got points for {grid.shape[0]}")
    points = numbered("point", count)
    operands = [
        Operand(0, x, ("batch", "channel", *("",) * count)),
        Operand(1, grid, ("batch", *points, ""), Role.PLAIN),
    ]
    result = Labelled(("batch", "channel", *points), (*x.shape[:2], *grid.shape[1:-1]))
    return linear_in_first(operands, result)


@rule("affine_grid_generator", params=("theta", "size", ("align_corners", False)))
def affine_grid_generator(theta: Any, size: Any, align_corners: bool = False) -> Outcome:
    """affine_grid: ``theta (n, 2, 3)`` to the points of images of ``size (n, c, h, w)``, and with one more dim of places."""
    sizes = tuple(size)
    count = len(sizes) - 2
    if not isinstance(theta, Spec) or count not in (2, 3) or theta.shape != (sizes[0], count, count + 1):
        raise ValueError(f"affine_grid takes theta (n, 2, 3) with size (n, c, h, w), got {theta} and {sizes}")
    result = Labelled(("batch", *("",) * (count + 1)), (sizes[0], *sizes[2:], count))
    found = linear_in_first([Operand(0, theta, ("batch", "", ""))], result)
    own = local_shape(theta, found.inputs[0])[0]
    return replace(found, replaced={1: (own, *sizes[1:])})


def _enter_unpool(count: int) -> None:
    @rule(f"max_unpool{count}d", params=("input", "indices", "output_size"))
    def plan(x: Any, indices: Any, output_size: Any, *rest: Any) -> Outcome:
        _image(x, f"max_unpool{count}d", count + 1, count + 2)
        if not isinstance(indices, Spec) or indices.shape != x.shape:
            raise ValueError(f"max_unpool{count}d takes a place for each value of {x}, got {indices}")
        sizes = each(output_size, count, "output_size")
        first = numbered("batch", len(x.shape) - count)
        labels: Labels = (*first, *("",) * count)
        operands = [Operand(0, x, labels), Operand(1, indices, labels, Role.PLAIN)]
        return linear_in_first(operands, Labelled(labels, (*x.shape[:-count], *sizes)))

    plan.__doc__ = f"max_unpool{count}d: each value at its place, zeros elsewhere."


for _count in (2, 3):
    _enter_unpool(_count)
