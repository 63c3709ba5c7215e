"""Dropout: a mask that every rank draws for the elements it holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hp_dtensor.rng.places import Generator, is_dtensor, place_of, take, whole_placements, wrapped_as
from hp_platform import get_platform
from hp_platform.draws import Distribution, Region
from hp_platform.on_platform import once
from hp_platform.random_stream import Draw

Tensor = Any


def dropout(x: Tensor, p: float = 0.5, training: bool = True, *, generator: Generator = None) -> Tensor:
    """Zeros with probability ``p``, the other elements times ``1 / (1 - p)``; ``x`` itself unless ``training``. Differentiable.

    A dropped element gives 0 also where it is infinite. The mask is drawn again in backward; on cuda it is kept, two bits an
    element, since reading it is quicker there. A Partial is reduced
    first (one all-reduce per mesh dim). ValueError unless ``0 <= p <= 1``.
    """
    Distribution.event(p)
    if not training:
        return x
    if is_dtensor(x):
        x = x.redistribute(placements=whole_placements(x._spec))
    local, region = place_of(x)
    return wrapped_as(x, drop_local(local, region, p, generator))


def drop_local(local: Tensor, region: Region, p: float, generator: Generator) -> Tensor:
    """``local`` without the elements that the next draw drops, the others times ``1 / (1 - p)``; differentiable, any order.

    ``local`` lies as the elements of ``region``.
    """
    platform = get_platform()
    if platform.device_of(local) == "meta":
        return platform.zeros_like(local)
    place = take(generator)
    if platform.requires_grad(local) and platform.is_grad_enabled():
        dropped: Tensor = _functions().Dropout.apply(local, p, place, region)
        return dropped
    return platform.dropout(local, p, place.seed, place.number, region)


def channel_factors(like: Tensor, region: Region, p: float, generator: Generator) -> Tensor:
    """0 or ``1 / (1 - p)`` for each channel: of the size of ``region`` (batch, channels), then 1 for each further dim."""
    platform = get_platform()
    shape = (*region.size, *(1 for _ in range(like.ndim - 2)))
    device = platform.device_of(like)
    ones = platform.full(region.size, 1, like.dtype, device)
    if device == "meta":
        return platform.reshape(ones, shape)
    place = take(generator)
    return platform.reshape(platform.dropout(ones, p, place.seed, place.number, region), shape)


@once
def _functions(platform: Any) -> SimpleNamespace:
    class Dropout(platform.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, p: float, place: Draw, region: Region) -> Tensor:
            ctx.given = (p, place, region)
            dropped, mask = platform.dropout_keeping(x, p, place.seed, place.number, region)
            ctx.has_mask = mask is not None
            if ctx.has_mask:
                ctx.save_for_backward(mask)
            return dropped

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            # A linear map is its own derivative, and this one its own adjoint.
            if platform.requires_grad(g) and platform.is_grad_enabled():
                return Dropout.apply(g, *ctx.given), None, None, None
            p, place, region = ctx.given
            mask = ctx.saved_tensors[0] if ctx.has_mask else None
            again = platform.dropout_again(g, mask, p, place.seed, place.number, region)
            return again, None, None, None

    return SimpleNamespace(Dropout=Dropout)
