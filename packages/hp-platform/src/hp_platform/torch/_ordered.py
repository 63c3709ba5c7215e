"""Floating numbers as integers in the same order, for backends whose max and min lose NaN.

[Note: NaN on the way] gloo compares with ``<``, which is false beside a NaN, and NCCL takes the number beside a NaN (seen with
torch 2.11 on H200): whether the result is NaN would depend on which rank has it, or it never would be. HCCL is not
measured. As integers numbers compare as they do as floats, the negative ones once all bits but the sign are flipped; NaN
takes the place of the largest integer for max, of the smallest for min. -0.0 is smaller than 0.0 there.
"""

from __future__ import annotations

import torch

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def ordered(x: torch.Tensor, op: str) -> torch.Tensor:
    """New integers, as wide as the floating ``x``, whose maximum (``op`` "max") or minimum ("min") over ranks stands for that of ``x``.

    Of 16-bit floats they are int16, which gloo and NCCL reduce as int32 only: twice the bytes on the wire.
    """
    dtype = _INTEGERS[x.element_size()]
    bounds = torch.iinfo(dtype)
    return _flipped(x.view(dtype)).masked_fill_(x.isnan(), bounds.max if op == "max" else bounds.min)


def of_ordered(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The floating numbers of ``dtype`` that such integers stand for. Where these are the bound for NaN it is a NaN."""
    return _flipped(keys.to(_INTEGERS[dtype.itemsize])).view(dtype)


def _flipped(bits: torch.Tensor) -> torch.Tensor:
    """Its own inverse."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)
