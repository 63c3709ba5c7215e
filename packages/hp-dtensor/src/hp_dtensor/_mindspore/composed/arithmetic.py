"""Numbers beside tensors."""

from __future__ import annotations

from typing import Any

import mindspore

from hp_platform import get_platform


def constant(value: Any, like: mindspore.Tensor) -> mindspore.Tensor:
    """A number as a tensor without dims, of the dtype of ``like``: rounded once."""
    platform = get_platform()
    made: mindspore.Tensor = platform.full((), value, like.dtype, platform.device_of(like))
    return made


def scaled(x: mindspore.Tensor, factor: Any) -> mindspore.Tensor:
    """``x * factor``."""
    return x if factor == 1 else x * constant(factor, x)
