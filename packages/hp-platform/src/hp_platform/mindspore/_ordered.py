"""Floating numbers as integers in the same order, since max and min over ranks lose NaN.

[Note: NaN on the way] MindSpore's kernels on CPU compare with ``<``, which is false beside a NaN (``mint.maximum`` as well): whether
the result is NaN would depend on which rank has it. As integers numbers compare as they do as floats, the negative ones
once all bits but the sign are flipped; NaN takes the place of the largest integer for max, of the smallest for min. -0.0
is smaller than 0.0 there. How HCCL compares is not documented; it reduces the same integers.
"""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import mint

from hp_platform.mindspore._dtypes import ITEMSIZE, NAME_OF

_INTEGERS = {4: mindspore.int32, 8: mindspore.int64}
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


def ordered(row: mindspore.Tensor, op: str) -> mindspore.Tensor:
    """A new row of integers whose maximum (``op`` "max") or minimum ("min") over ranks stands for that of the floating ``row``.

    int32 and int64, which the kernels of the collectives know: 16-bit floats travel with twice their bytes.
    """
    wide = row.astype(mindspore.float32) if ITEMSIZE[NAME_OF[row.dtype]] < 4 else row
    dtype = _INTEGERS[ITEMSIZE[NAME_OF[wide.dtype]]]
    bound = _bound(dtype, "max" if op == "max" else "min")
    return mint.where(wide != wide, bound, _flipped(wide.view(dtype)))


def of_ordered(keys: mindspore.Tensor, dtype: Any) -> mindspore.Tensor:
    """The floating numbers of ``dtype`` that such integers stand for. Where these are the bound for NaN it is a NaN."""
    wide = mindspore.float64 if keys.dtype == mindspore.int64 else mindspore.float32
    values = _flipped(keys).view(wide)
    return values if dtype == wide else values.astype(dtype)


def _flipped(bits: mindspore.Tensor) -> mindspore.Tensor:
    """Its own inverse: ``bits ^ max`` where they are negative, in arithmetic, since there is no such kernel on CPU."""
    return mint.where(bits < 0, _bound(bits.dtype, "min") - bits - 1, bits)


def _bound(dtype: Any, which: str) -> mindspore.Tensor:
    name = NAME_OF[dtype]
    return mindspore.Tensor(np.array(getattr(np.iinfo(name), which), name))
