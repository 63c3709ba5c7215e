"""Local tensors written in place, whole ones by the platform, which writes every dtype, strided and empty ones too."""

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


def setitem(x: Tensor, index: Any, value: Any) -> Tensor:
    """``x[index] = value``, where nothing is recorded; ``index`` as it is written, or the tuple of its entries.

    Where tensors name the places, MindSpore writes into a copy and gives its memory to ``x``: it refuses that for leaves with
    a gradient, and tensors that share memory with ``x`` would keep their values. So the copy is made, and written back, here.
    """
    entries = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(entry, mindspore.Tensor) for entry in entries):
        x[index] = value
        return x
    platform = get_platform()
    written = platform.clone(x)
    written[index] = value
    return platform.copy_(x, written)
