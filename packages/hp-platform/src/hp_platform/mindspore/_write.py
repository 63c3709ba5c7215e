"""Writing into a tensor so that it really changes.

[Note: writing on MindSpore] On CPU ``x.add_(y)``, ``x += y`` and ``x[...] = y`` make a new tensor and leave the memory of ``x``
as it is, silently, and so does ``copy_`` into a view. What does write is assignment to a slice, ``x[:] = y``, while nothing
is recorded: it reaches the base of any view, and every alias sees it. Three cases need help: a tensor without dims has no
slice (it is viewed as one of length 1), bfloat16 has no kernel (its bits travel as int16), and a source that overlaps the
target makes the kernel fail (it is copied first). Python numbers never go in directly: MindSpore rounds them to float32,
also for a float64 tensor.
"""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np

from hp_platform.mindspore import _private
from hp_platform.mindspore._dtypes import NAME_OF
from hp_platform.mindspore._recording import no_grad

_EVERYTHING = slice(None)


def write(x: mindspore.Tensor, value: mindspore.Tensor) -> None:
    """``value``, broadcast and cast, becomes the contents of ``x``. ValueError if the shapes do not fit."""
    with no_grad():
        source, target = value, x
        if not _fits(source.shape, target.shape):
            raise ValueError(
                f"a value of shape {tuple(source.shape)} cannot be written into a tensor of shape {tuple(target.shape)}"
            )
        if x.size == 0 or x.is_meta:
            return
        if source.dtype != target.dtype:
            source = source.astype(target.dtype)
        elif source.untyped_storage().data_ptr() == target.untyped_storage().data_ptr():
            source = _private.own_copy(source)
        if target.ndim == 0:
            target = target.view((1,))
        if target.dtype == mindspore.bfloat16:
            if source.ndim == 0:
                source = source.view((1,))
            source, target = source.view(mindspore.int16), target.view(mindspore.int16)
        target[_EVERYTHING] = source


def exact_number(value: Any, dtype: Any) -> mindspore.Tensor:
    """A Python number as a 0-d tensor of ``dtype``, rounded once."""
    if dtype == mindspore.bfloat16:
        return mindspore.Tensor(np.array(value, np.float32)).astype(dtype)
    return mindspore.Tensor(np.array(value).astype(NAME_OF[dtype]))


def _fits(source: tuple[int, ...], target: tuple[int, ...]) -> bool:
    if len(source) > len(target):
        return False
    pairs = zip(reversed(source), reversed(target), strict=False)
    return all(have in (1, want) for have, want in pairs)
