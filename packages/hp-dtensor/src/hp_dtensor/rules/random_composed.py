"""More of the framework's own random functions on DTensors: values composed of draws, and dropouts that keep the variance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor.rng import composed
from hp_dtensor.rng.dropout import channel_factors
from hp_dtensor.rng.places import region_of, take, whole_placements
from hp_dtensor.rng.writing import drawn, write_values
from hp_dtensor.rules.elementwise import pointwise
from hp_dtensor.rules.random import writing
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.spec import Spec, make_spec
from hp_platform import get_platform
from hp_platform.draws import Distribution, Region

Tensor = Any


@rule("cauchy_", params=("input", ("median", 0.0), ("sigma", 1.0)), by_value=False, in_place=True)
def cauchy_(x: Any, *args: Any, **kwargs: Any) -> Outcome:
    """``x.cauchy_(median, sigma)``."""
    return writing(x, composed.cauchy, "cauchy_", write_values)


@rule("log_normal_", params=("input", ("mean", 1.0), ("std", 2.0)), by_value=False, in_place=True)
def log_normal_(x: Any, *args: Any, **kwargs: Any) -> Outcome:
    """``x.log_normal_(mean, std)``."""
    return writing(x, composed.log_normal, "log_normal_", write_values)


@rule("geometric_", params=("input", "p"), by_value=False, in_place=True)
def geometric_(x: Any, *args: Any, **kwargs: Any) -> Outcome:
    """``x.geometric_(p)``."""
    return writing(x, composed.geometric, "geometric_", write_values)


def _of_whole(x: Spec, draw: Callable[[Tensor, Region, Any], Tensor]) -> Outcome:
    """``draw`` of values that lie as ``x`` does, or whole where that is a sum."""
    lies = whole_placements(x)
    region = region_of(make_spec(x.mesh, lies, x.shape))
    return Outcome(
        (lies,), lies, x.shape, run=lambda local, *_, generator=None, **__: draw(local, region, generator)
    )


@rule("poisson", params=("input",), by_value=False)
def poisson(x: Any, generator: Any = None) -> Outcome:
    """``poisson(rates)``."""
    return _of_whole(x, composed.poisson_of)


@rule("normal", params=("mean", ("std", 1.0)), by_value=False)
def normal(mean: Any, std: Any = 1.0, generator: Any = None) -> Outcome:
    """``normal(mean, std)`` with a tensor for one of them or both."""
    found = pointwise((mean, std))
    first = mean if isinstance(mean, Spec) else std
    assert found.output is not None
    region = region_of(make_spec(first.mesh, found.output, found.shape))

    def run(of_mean: Any, of_std: Any = 1.0, generator: Any = None) -> Tensor:
        platform = get_platform()
        like = of_mean if platform.is_tensor(of_mean) else of_std
        standard = Distribution.normal(0.0, 1.0, platform.dtype_name(like.dtype))
        values = drawn(standard, region, platform.device_of(like), generator)
        with platform.no_grad():
            return values * of_std + of_mean

    return Outcome(found.inputs, found.output, found.shape, run=run)


# --------------------------------------------------------------------------------------------------------------- dropout
def _unchanged(local: Tensor, *_: Any, **__: Any) -> Tensor:
    return local


def _factors(like: Tensor, region: Region, p: float, generator: Any) -> Tensor:
    """0 for what is dropped."""
    platform = get_platform()
    ones = platform.full(region.size, 1, like.dtype, platform.device_of(like))
    if platform.device_of(like) == "meta":
        return ones
    place = take(generator)
    return platform.dropout(ones, p, place.seed, place.number, region)


@rule("alpha_dropout", params=("input", ("p", 0.5), ("training", False)))
def alpha_dropout(x: Any, p: float = 0.5, training: bool = False, generator: Any = None) -> Outcome:
    """Dropout beside SELU: what is dropped gets its saturation value, and all is shifted and scaled back."""
    Distribution.event(p)
    if not training:
        return Outcome((x.placements,), x.placements, x.shape, run=_unchanged)

    def draw(local: Tensor, region: Region, own: Any) -> Tensor:
        return composed.alpha_dropped(local, _factors(local, region, p, own), p)

    return _of_whole(x, draw)


@rule("feature_alpha_dropout", params=("input", ("p", 0.5), ("training", False)))
def feature_alpha_dropout(x: Any, p: float = 0.5, training: bool = False) -> Outcome:
    """As alpha_dropout, of whole channels (dim 1)."""
    Distribution.event(p)
    if not training:
        return Outcome((x.placements,), x.placements, x.shape, run=_unchanged)
    spec = make_spec(x.mesh, whole_placements(x), x.shape)
    if len(x.shape) < 2 or len(spec.local_shape) != len(x.shape):
        raise ValueError(
            f"channels are dropped of tensors (batch, channels, ...) that are not ragged, got {x}"
        )
    region = Region(x.shape[:2], spec.local_offset[:2], spec.local_shape[:2])
    return _of_whole(
        x, lambda local, _, own: composed.alpha_dropped(local, channel_factors(local, region, p, own), p)
    )


@rule("rrelu", params=("input", ("lower", 0.125), ("upper", 1 / 3), ("training", False)))
def rrelu(
    x: Any, lower: float = 0.125, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Outcome:
    """What is below 0 times a slope: a uniform number of its own in training, else the mean of both ends."""

    def draw(local: Tensor, region: Region, own: Any) -> Tensor:
        platform = get_platform()
        slopes: Any = (lower + upper) / 2
        if training:
            uniform = Distribution.uniform(lower, upper, platform.dtype_name(local.dtype))
            slopes = drawn(uniform, region, platform.device_of(local), own)
        return platform.where(local < 0, local * slopes, local)

    return _of_whole(x, draw)
