"""Tensors that are made when something is done with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

Linear = Callable[[torch.Tensor, "torch.Tensor | None"], torch.Tensor]

_FACTS = frozenset(
    {
        torch.Tensor.shape.__get__,
        torch.Tensor.dtype.__get__,
        torch.Tensor.device.__get__,
        torch.Tensor.ndim.__get__,
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
    }
)
"""What can be told without the values."""


class StandIn(torch.Tensor):
    """Shape, dtype and device of a tensor, and how to get it. Every function that is called on it is called on that tensor."""

    _get: Callable[[], torch.Tensor]
    _linear: Linear | None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Put the real tensors in the places of those that stand in for them."""
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear and len(args) > 1 and type(args[1]) is StandIn:
            linear = args[1]._linear
            if linear is not None:
                return linear(args[0], args[2] if len(args) > 2 else kwargs.get("bias"))
        if func not in _FACTS:
            args, kwargs = _pytree.tree_map(_real, (args, kwargs))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Nothing comes down here: what records gradients is above."""
        raise RuntimeError(
            f"{func} was given the stand-in of a parameter by code that functions of torch are not asked in: call it on the "
            "parameter itself, inside of its module's forward"
        )


def _real(x: Any) -> Any:
    return x._get() if type(x) is StandIn else x


def stand_in(
    shape: Sequence[int],
    dtype: Any,
    device: str,
    get: Callable[[], torch.Tensor],
    linear: Linear | None = None,
) -> StandIn:
    """A stand-in for what ``get()`` gives."""
    made: Any = torch.Tensor._make_wrapper_subclass(StandIn, tuple(shape), dtype=dtype, device=device)
    made._get, made._linear = get, linear
    return made
