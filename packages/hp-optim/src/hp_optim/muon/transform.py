"""A function of the caller's in the place of the Newton-Schulz iteration.

[Note: functions of the caller] A function gets a stack ``(b, rows, cols)`` of whole matrices: a plain tensor in ``ns_dtype``, on the device
of the iterations and on their stream, contiguous, in memory that it may write on; nothing is recorded. It returns a tensor of
the same shape on the same device, in new memory or in that of the stack. Another dtype is cast to ``ns_dtype``, in which results
travel. It must not

* communicate: only the owner of a matrix calls it, so other ranks do not come;
* let what a matrix becomes depend on those beside it in the stack, on their number, or on its place: which stand together follows from
  sharding, ranks and ``memory_cap``;
* return memory that it keeps and writes again: a result is read while the next stacks are made.

If it waits for the device, as decompositions may, the step is right and slower: the exchanges start after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hp_optim.muon.kinds import TRANSFORM, Transform
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor

_MOST_NAMES = 3
"""So many parameters are named in an error."""


def transformed(platform: Platform, kind: Transform, x: Tensor, names: Callable[[], Sequence[str]]) -> Tensor:
    """What the function makes of a stack, contiguous in the dtype of the kind. ``names``: of the parameters in the stack.

    TypeError for a result that is no tensor, ValueError for one of another shape or on another device.
    """
    shape, device = tuple(x.shape), platform.device_of(x)
    result = kind.function(platform.contiguous(platform.cast(x, kind.dtype)))
    if not platform.is_tensor(result) or hasattr(result, "device_mesh"):
        raise TypeError(_wrong(kind, f"a {type(result).__qualname__}", shape, device, names()))
    found = tuple(result.shape)
    if found != shape:
        raise ValueError(_wrong(kind, f"a tensor of shape {found}", shape, device, names()))
    place = platform.device_of(result)
    if place != device:
        raise ValueError(_wrong(kind, f"a tensor on {place}", shape, device, names()))
    return platform.contiguous(platform.cast(platform.detach(result), kind.dtype))


def _wrong(kind: Transform, given: str, shape: Sequence[int], device: str, names: Sequence[str]) -> str:
    listed = list(dict.fromkeys(names))
    rest = f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
    return (
        f"Muon: {TRANSFORM} {kind.name} returned {given} for a stack of matrices of {', '.join(listed[:_MOST_NAMES])}{rest}; expected is a "
        f"plain tensor of the stack's shape {tuple(shape)} on {device}: return what every matrix becomes, at its place in the stack"
    )


def check_function(optimizer: str, given: Any) -> None:
    """ValueError for what cannot be called."""
    if given is not None and not callable(given):
        raise ValueError(
            f"{optimizer}: {TRANSFORM} is {given!r}; expected a function of a stack of matrices (b, rows, cols), such as "
            "hp_optim.sinkhorn(), or None for Newton-Schulz"
        )


def transform_bytes(shape: Sequence[int], from_itemsize: int, itemsize: int) -> int:
    """Bytes that a matrix ``(m, n)`` takes in a batch: stacked, as argument and as result, and two copies in at least 32 bits.

    The copies are what a function may take of its own, as that of :func:`hp_optim.sinkhorn` does; nobody knows what others do.
    """
    rows, cols = shape
    return rows * cols * (from_itemsize + 2 * itemsize + 2 * max(4, itemsize))
