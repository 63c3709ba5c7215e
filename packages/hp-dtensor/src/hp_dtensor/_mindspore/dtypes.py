"""Numbers by which MindSpore's primitives get dtypes."""

from __future__ import annotations

from typing import Any, Final

import mindspore
from mindspore.ops._utils.arg_handler import dtype_to_type_id

_DTYPES = (
    mindspore.bool_,
    mindspore.int8,
    mindspore.int16,
    mindspore.int32,
    mindspore.int64,
    mindspore.uint8,
    mindspore.float16,
    mindspore.float32,
    mindspore.float64,
    mindspore.bfloat16,
)
_BY_NUMBER: Final[dict[int, Any]] = {dtype_to_type_id("Cast", "dtype", dtype): dtype for dtype in _DTYPES}


def dtype_of(number: Any) -> Any:
    """The dtype that a primitive got as a number; None and dtypes as they are. ValueError for an unknown number."""
    if not isinstance(number, int):
        return number
    if number not in _BY_NUMBER:
        raise ValueError(
            f"mindspore's dtype number {number} is none of {', '.join(map(str, _DTYPES))}: cast the tensor first"
        )
    return _BY_NUMBER[number]
