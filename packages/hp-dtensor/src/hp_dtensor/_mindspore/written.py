"""Whole local tensors written in place, by the platform, which writes every dtype, strided and empty ones too."""

from __future__ import annotations

from typing import Any

import mindspore

from hp_platform import get_platform

Tensor = Any


def copy_(x: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """The values of ``src``, broadcast and cast."""
    return get_platform().copy_(x, src)


def fill_(x: Tensor, value: Any) -> Tensor:
    """A number, or that of a 0-d tensor, everywhere."""
    platform = get_platform()
    return platform.copy_(x, value) if isinstance(value, mindspore.Tensor) else platform.fill_(x, value)


def zero_(x: Tensor) -> Tensor:
    """Zeros everywhere."""
    return get_platform().fill_(x, 0)
