"""Names of MindSpore's dtypes."""

from __future__ import annotations

from typing import Any

import mindspore

ITEMSIZE: dict[str, int] = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes of one element."""

DTYPE_OF: dict[str, Any] = {
    name: getattr(mindspore, "bool_" if name == "bool" else name) for name in ITEMSIZE
}
NAME_OF: dict[Any, str] = {dtype: name for name, dtype in DTYPE_OF.items()}
FLOATING = frozenset({"float32", "float64", "float16", "bfloat16"})


def resolve(dtype: Any) -> Any:
    """The MindSpore dtype of a name or dtype. ValueError for an unknown one."""
    try:
        if dtype in NAME_OF:
            return dtype
        return DTYPE_OF[dtype]
    except (KeyError, TypeError):
        raise ValueError(
            f"unknown dtype {dtype!r}; expected a mindspore dtype or one of {', '.join(DTYPE_OF)}"
        ) from None
