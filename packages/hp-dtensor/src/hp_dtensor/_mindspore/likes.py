"""Functions of ``mindspore.ops`` that make a tensor like another one, or draw by one, of DTensors.

They are written in Python and ask for shape and dtype only, so nothing of them dispatches: left alone they give a plain tensor
of the whole shape on every rank, and the drawn ones other numbers than the unsharded program has. ``multinomial`` is one of
them: what it draws without replacement would differ from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
from mindspore import mint

from hp_dtensor import random
from hp_dtensor._mindspore.samples import multinomial
from hp_dtensor.base import DTensorBase
from hp_platform.mindspore import _private

Call = Callable[..., Any]


def _full(x: Any, fill_value: Any, *, dtype: Any = None) -> Any:
    return mint.full_like(x, fill_value, dtype=dtype)


def _uniform(x: Any, seed: int | None = None, *, dtype: Any = None) -> Any:
    return random.rand_like(x, dtype=_checked(x.dtype if dtype is None else dtype, "float", seed))


def _normal(x: Any, seed: int | None = None, *, dtype: Any = None) -> Any:
    return random.randn_like(x, dtype=_checked(mindspore.float32 if dtype is None else dtype, "float", seed))


def _whole_numbers(x: Any, low: int, high: int, seed: int | None = None, *, dtype: Any = None) -> Any:
    wanted = _checked(x.dtype if dtype is None else dtype, "int", seed)
    return random.randint_like(x, low, high, dtype=wanted)


def _checked(dtype: Any, kind: str, seed: int | None) -> Any:
    _refuse_seed(seed)
    if kind not in str(dtype).lower():
        raise ValueError(f"dtype must be one of {kind}s, got {dtype}: give dtype=")
    return dtype


def _categories(x: Any, num_samples: int, replacement: bool = True, seed: int | None = None) -> Any:
    _refuse_seed(seed)
    return multinomial(x, num_samples, replacement, mindspore.int32)


def _refuse_seed(seed: int | None) -> None:
    if seed is not None:
        raise ValueError(
            f"seed={seed} of a DTensor: its draws come from one stream for all operations; leave seed out, and call "
            f"hp_dtensor.random.manual_seed before"
        )


_OF_DTENSORS: dict[str, Call] = {
    "full_like": _full,
    "rand_like": _uniform,
    "randn_like": _normal,
    "randint_like": _whole_numbers,
    "multinomial": _categories,
}


def define_likes() -> None:
    """Let these functions of ``mindspore.ops`` follow a DTensor."""
    for name, of_dtensor in _OF_DTENSORS.items():
        _private.wrap_function(name, _choosing(of_dtensor))


def _choosing(of_dtensor: Call) -> Callable[[Call], Call]:
    def around(function: Call) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            x, rest = (args[0], args[1:]) if args else (kwargs.get("input"), ())
            if not isinstance(x, DTensorBase):
                return function(*args, **kwargs)
            return of_dtensor(x, *rest, **{key: value for key, value in kwargs.items() if key != "input"})

        return call

    return around
