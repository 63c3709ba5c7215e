"""The framework's own random functions on DTensors: every rank draws the elements that it holds, as :mod:`hp_dtensor.random` does.

A plan is made once and used often, so the place in the stream is taken when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor.rng import filling
from hp_dtensor.rng.dropout import channel_factors, drop_local
from hp_dtensor.rng.places import refuse_partial, region_of, whole_placements
from hp_dtensor.rng.writing import OfDtype, drawn, with_probabilities, write
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.spec import Spec, make_spec
from hp_platform import get_platform
from hp_platform.draws import Distribution, Region

Tensor = Any


# -------------------------------------------------------------------------------------------------------- values in place
def writing(x: Spec, of: Callable[..., Any], name: str, fill: Callable[..., Tensor] = write) -> Outcome:
    """``fill(local, region, of(*arguments), generator)``, where the arguments are those of the call but for ``generator``."""
    refuse_partial(x, f"{name} of")
    region = region_of(x)

    def run(local: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
        platform = get_platform()
        if platform.requires_grad(local) and platform.is_grad_enabled():
            raise RuntimeError(
                f"{name} of a DTensor that requires grad would change what backward counts on: call it under no_grad()"
            )
        return fill(local, region, of(*args, **kwargs), generator)

    return Outcome((x.placements,), x.placements, x.shape, run=run)


@rule("uniform_", params=("input", ("from", 0.0), ("to", 1.0)), by_value=False, in_place=True)
def uniform_(x: Any, *args: Any, **kwargs: Any) -> Outcome:
    """``x.uniform_(low, high)``."""
    return writing(
        x, lambda low=0.0, high=1.0: lambda name: Distribution.uniform(low, high, name), "uniform_"
    )


@rule("normal_", params=("input", ("mean", 0.0), ("std", 1.0)), by_value=False, in_place=True)
def normal_(x: Any, *args: Any, **kwargs: Any) -> Outcome:
    """``x.normal_(mean, std)``."""
    return writing(x, lambda mean=0.0, std=1.0: lambda name: Distribution.normal(mean, std, name), "normal_")


@rule("exponential_", params=("input", ("lambd", 1.0)), by_value=False, in_place=True)
def exponential_(x: Any, *args: Any, **kwargs: Any) -> Outcome:
    """``x.exponential_(rate)``."""
    return writing(x, lambda rate=1.0: lambda name: Distribution.exponential(rate, name), "exponential_")


@rule("bernoulli_", params=("input", ("p", 0.5)), by_value=False, in_place=True)
def bernoulli_(x: Any, p: Any = 0.5, **kwargs: Any) -> Outcome:
    """``x.bernoulli_(p)`` of one probability."""
    if isinstance(p, Spec):
        raise ValueError(
            "bernoulli_ takes one probability; for one per element write x.copy_(torch.bernoulli(p))"
        )
    return writing(x, lambda share=0.5: lambda name: Distribution.event(share), "bernoulli_")


@rule("random_", params=("input", ("from", None), ("to", None)), by_value=False, in_place=True)
def random_(x: Any, *args: Any, **kwargs: Any) -> Outcome:
    """``x.random_()``, ``x.random_(high)``, ``x.random_(low, high)``."""

    def of(low: int | None = None, high: int | None = None) -> OfDtype:
        # One number alone is the end, but by the name "from" it cannot be given alone.
        first, last = (0, low) if high is None else (low or 0, high)
        return filling.whole_numbers(first, last)

    return writing(x, of, "random_")


# ------------------------------------------------------------------------------------------------------------ new tensors
def _like(x: Spec, of: Callable[..., OfDtype]) -> Outcome:
    """A tensor that lies as ``x`` does, but Replicate where that is Partial; of ``x`` only shape, dtype and device count."""
    lies = whole_placements(x)
    region = region_of(make_spec(x.mesh, lies, x.shape))

    def run(local: Tensor, *args: Any, generator: Any = None, **options: Any) -> Tensor:
        platform = get_platform()
        name, device, requires_grad = _options(local, options)
        made = drawn(of(*args, **options)(name), region, device, generator)
        return platform.set_requires_grad_(made, True) if requires_grad else made

    return Outcome((None,), lies, x.shape, run=run)


def _options(local: Tensor, options: dict[str, Any]) -> tuple[str, str, bool]:
    """Takes the options of a new tensor out of ``options``: name of the dtype, device, requires_grad. Memory formats do not count."""
    platform = get_platform()
    for name in ("memory_format", "layout", "pin_memory"):
        options.pop(name, None)
    dtype, device = options.pop("dtype", None), options.pop("device", None)
    return (
        platform.dtype_name(local.dtype if dtype is None else dtype),
        platform.device_of(local) if device is None else str(device),
        bool(options.pop("requires_grad", False)),
    )


@rule("rand_like", params=("input",), by_value=False)
def rand_like(x: Any, **kwargs: Any) -> Outcome:
    """Uniform in [0, 1)."""
    return _like(x, lambda: lambda name: Distribution.uniform(0.0, 1.0, name))


@rule("randn_like", params=("input",), by_value=False)
def randn_like(x: Any, **kwargs: Any) -> Outcome:
    """Standard normal."""
    return _like(x, lambda: lambda name: Distribution.normal(0.0, 1.0, name))


@rule("randint_like", params=("input", ("low", 0), ("high", None)), by_value=False)
def randint_like(x: Any, *args: Any, **kwargs: Any) -> Outcome:
    """``randint_like(x, high)``, ``randint_like(x, low, high)``."""

    def of(low: int, high: int | None = None) -> OfDtype:
        first, last = (0, low) if high is None else (low, high)
        return lambda name: Distribution.integers(first, last, name)

    return _like(x, of)


@rule("bernoulli", params=("input", ("p", None)), by_value=False)
def bernoulli(x: Any, *args: Any, **kwargs: Any) -> Outcome:
    """1 with the probability of each element, or with ``p``; a sum is made whole first."""
    lies = whole_placements(x)
    region = region_of(make_spec(x.mesh, lies, x.shape))

    def run(local: Tensor, p: float | None = None, generator: Any = None) -> Tensor:
        platform = get_platform()
        if p is None:
            return with_probabilities(local, region, generator)
        events = drawn(Distribution.event(p), region, platform.device_of(local), generator)
        return platform.cast(events, local.dtype)

    return Outcome((lies,), lies, x.shape, run=run)


def _constant(x: Spec, given: Any) -> Outcome:
    lies = whole_placements(x)
    shape = make_spec(x.mesh, lies, x.shape).local_shape

    def run(local: Tensor, *args: Any, **options: Any) -> Tensor:
        platform = get_platform()
        name, device, requires_grad = _options(local, options)
        value = given if given is not _ARGUMENT else options.pop("fill_value", *args)
        made = (
            platform.empty(shape, name, device)
            if value is None
            else platform.full(shape, value, name, device)
        )
        return platform.set_requires_grad_(made, True) if requires_grad else made

    return Outcome((None,), lies, x.shape, run=run)


_ARGUMENT = object()


@rule("zeros_like", params=("input",), by_value=False)
def zeros_like(x: Any, **kwargs: Any) -> Outcome:
    """Zeros that lie as ``x``, Replicate where that is Partial; likewise the next ones."""
    return _constant(x, 0)


@rule("ones_like", params=("input",), by_value=False)
def ones_like(x: Any, **kwargs: Any) -> Outcome:
    """Ones."""
    return _constant(x, 1)


@rule("empty_like", params=("input",), by_value=False)
def empty_like(x: Any, **kwargs: Any) -> Outcome:
    """Memory whose values do not count."""
    return _constant(x, None)


@rule("full_like", params=("input", "fill_value"), by_value=False)
def full_like(x: Any, *args: Any, **kwargs: Any) -> Outcome:
    """One value everywhere."""
    return _constant(x, _ARGUMENT)


# ---------------------------------------------------------------------------------------------------------------- dropout
@rule("dropout", params=("input", ("p", 0.5), ("training", True)))
def dropout(x: Any, p: float = 0.5, training: bool = True, generator: Any = None) -> Outcome:
    """``F.dropout(x, p, training)``: a sum is made whole first; nothing happens outside of training."""
    if not training:
        return Outcome((x.placements,), x.placements, x.shape, run=_unchanged)
    Distribution.event(p)
    lies = whole_placements(x)
    region = region_of(make_spec(x.mesh, lies, x.shape))

    def run(local: Tensor, *_: Any, generator: Any = None, **__: Any) -> Tensor:
        return drop_local(local, region, p, generator)

    return Outcome((lies,), lies, x.shape, run=run)


@rule("feature_dropout", params=("input", "p", "train"))
def feature_dropout(x: Any, p: float, train: bool) -> Outcome:
    """What dropout1d, dropout2d and dropout3d call: whole channels (dim 1 of each sample) are dropped."""
    if not train:
        return Outcome((x.placements,), x.placements, x.shape, run=_unchanged)
    Distribution.event(p)
    if len(x.shape) < 2:
        raise ValueError(f"channels are dropped of tensors with batch and channel dims, got shape {x.shape}")
    lies = whole_placements(x)
    spec = make_spec(x.mesh, lies, x.shape)
    if len(spec.local_shape) != len(x.shape):
        raise ValueError(
            "channels of a ragged tensor lie on several ranks: redistribute it to Shard or Replicate first"
        )
    region = Region(x.shape[:2], spec.local_offset[:2], spec.local_shape[:2])

    def run(local: Tensor, *_: Any, **__: Any) -> Tensor:
        return local * channel_factors(local, region, p, None)

    return Outcome((lies,), lies, x.shape, run=run)


def _unchanged(local: Tensor, *_: Any, **__: Any) -> Tensor:
    return local
