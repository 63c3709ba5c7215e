"""What MindSpore's functions end in: primitives, known by their names, each with its rule and what runs on local tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspore.ops import Primitive

from hp_dtensor import _names
from hp_dtensor._mindspore.composed.along import cumprod
from hp_dtensor._mindspore.composed.index import index_add
from hp_dtensor._mindspore.written import copy_, fill_, setitem, zero_
from hp_dtensor.rules import RULES
from hp_platform import get_platform

Call = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any] | None]

TABLE = {name: RULES[rule] for rule, name in _names.primitives()}
"""Name of a primitive -> its rule."""

_HOLDING_BACK = frozenset({"Stack"})
"""Primitives that are objects and do not give their attributes with the arguments."""

RIGHT: dict[str, Callable[..., Any]] = {
    "matmul": get_platform().matmul,
    "__matmul__": get_platform().matmul,
    "clone": get_platform().clone,
    "cumprod": cumprod,
    "index_add": index_add,
    "copy_": copy_,
    "fill_": fill_,
    "zero_": zero_,
    "__setitem__": setitem,
}
"""What runs instead of MindSpore's own.

Its products of small shapes have wrong gradients, clone has no kernel on cpu, the gradient of cumprod divides by the
elements, writing has kernels for some dtypes only, index_add on cpu writes into its input, and subscripts that are tensors give a tensor
other memory.
"""


def understood(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Call:
    """The call as the primitive's rule takes it: what to run on local tensors, and the arguments."""
    function = RIGHT.get(func.name, func)
    if args and isinstance(args[0], Primitive):
        # A primitive that is an object comes with itself, its name and its arguments.
        primitive, name, args = args
        if name in _HOLDING_BACK:
            kwargs = {key: value for key, value in primitive.init_attrs.items() if key != "name"}
        function = RIGHT.get(func.name, _on_tensors(func, primitive, name, len(args)))
    return function, args, kwargs


def _on_tensors(func: Any, primitive: Primitive, name: str, count: int) -> Callable[..., Any]:
    """The primitive on its ``count`` arguments; what the rule takes besides, it knows itself."""

    def call(*local: Any, **_: Any) -> Any:
        return func(primitive, name, local[:count])

    call.__name__ = call.__qualname__ = name
    return call
