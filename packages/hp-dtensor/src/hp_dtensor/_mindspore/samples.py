"""``multinomial`` of MindSpore on DTensors: categories drawn by their weights, equal for every sharding."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Tensor, mint, ops

from hp_dtensor._mindspore.composed.along import topk
from hp_dtensor.placements import REPLICATE, Shard
from hp_dtensor.rng.places import region_of
from hp_dtensor.rng.writing import drawn
from hp_dtensor.spec import make_spec
from hp_platform import get_platform
from hp_platform.draws import Distribution, Region


def multinomial(x: Any, num_samples: int, replacement: bool, dtype: Any = mindspore.int64) -> Any:
    """Numbers of categories, ``(rows, num_samples)`` or ``(num_samples,)``, by the weights ``x`` ``(rows, categories)``.

    Without replacement every category gets a waiting time, exponential with its weight as the rate, and the first ones are
    taken: so they come in the order in which they would be drawn one by one. With replacement each uniform number is looked up
    in the running sums. Rows may be cut; weights of a row are joined (an all-gather). One draw from the stream. A category of
    weight 0 is drawn only where no other is left. ValueError for more samples than categories, and for weights with more dims.
    """
    ndim = x.ndim
    if ndim not in (1, 2):
        raise ValueError(
            f"multinomial of a DTensor takes weights (rows, categories) or (categories,), got shape {tuple(x.shape)}"
        )
    count = x.shape[-1]
    if num_samples < 1 or (not replacement and num_samples > count):
        raise ValueError(
            f"multinomial of a DTensor cannot draw {num_samples} of {count} categories without replacement"
        )
    lies = [p if ndim == 2 and p == Shard(0) else REPLICATE for p in x.placements]
    x = x.detach().redistribute(placements=lies)
    spec = make_spec(x.device_mesh, x.placements, (*x.shape[:-1], num_samples))
    region = region_of(spec if replacement else x._spec)
    with get_platform().no_grad():
        numbers = _of_local(x._local.astype(mindspore.float64), num_samples, replacement, region)
    return x._wrap(numbers.astype(dtype), spec)


def _of_local(weights: Tensor, num_samples: int, replacement: bool, region: Region) -> Tensor:
    """Of this rank's rows. A rank without rows takes its place in the stream, too."""
    kind = (
        Distribution.uniform(0.0, 1.0, "float64") if replacement else Distribution.exponential(1.0, "float64")
    )
    numbers = drawn(kind, region, get_platform().device_of(weights), None)
    if 0 in weights.shape:
        return get_platform().zeros(
            (*weights.shape[:-1], num_samples), "int64", get_platform().device_of(weights)
        )
    if not replacement:
        return topk(weights / numbers, num_samples)[1]
    sums = ops.cumsum(weights, -1)
    found = ops.searchsorted(sums, numbers * sums[..., -1:], right=True)
    return mint.clamp(found, max=weights.shape[-1] - 1)
