"""Names of PyTorch's dtypes."""

from __future__ import annotations

from typing import Any

import torch

_NAMES = (
    *(
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
    ),
    *(
        "bool",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ),
)

DTYPE_OF: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}
NAME_OF: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPE_OF.items()}

# numpy has none of these; float32 holds each of their values exactly.
WITHOUT_NUMPY = frozenset(
    dtype for name, dtype in DTYPE_OF.items() if name == "bfloat16" or name.startswith("float8")
)


def resolve(dtype: Any) -> torch.dtype:
    """The torch dtype of a name or dtype. ValueError for an unknown name."""
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        return DTYPE_OF[dtype]
    except (KeyError, TypeError):
        raise ValueError(
            f"unknown dtype {dtype!r}; expected a torch.dtype or one of {', '.join(DTYPE_OF)}"
        ) from None
