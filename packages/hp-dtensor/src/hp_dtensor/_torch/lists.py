"""Functions of torch on lists of tensors: those that torch.optim, GradScaler and clip_grad_norm_ call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from hp_dtensor import foreach
from hp_dtensor._names.foreach import ELEMENTWISE, FUSED
from hp_dtensor.skip_dispatch import is_skipped, on_locals
from hp_platform import _process


def handlers() -> dict[Any, Callable[..., Any]]:
    """Function of torch -> what runs instead when a DTensor is in its lists."""
    found: dict[Any, Callable[..., Any]] = {}
    for name in ELEMENTWISE.split():
        for function in (getattr(torch, f"_foreach_{name}{end}", None) for end in ("", "_")):
            if function is not None:
                writes = function.__name__.endswith("_")
                found[function] = _elementwise(_counting(function) if writes else function, writes=writes)
    for name in FUSED.split():
        function = getattr(torch, f"_fused_{name}_", None)
        if function is not None:
            found[function] = _elementwise(_counting(function), writes=True)
    found[torch._foreach_norm] = _norms
    check = torch._amp_foreach_non_finite_check_and_unscale_
    found[check] = partial(foreach.unscale, check)
    return {function: _unless_skipped(function, handler) for function, handler in found.items()}


def _unless_skipped(function: Any, handler: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if _process.open_modes.count and is_skipped(function):
            return on_locals(function, args, kwargs)
        return handler(*args, **kwargs)

    return run


def _elementwise(function: Any, *, writes: bool) -> Callable[..., Any]:
    def handler(*args: Any, **kwargs: Any) -> Any:
        if not args:  # fused optimizers may be called by keyword
            kwargs = dict(kwargs)
            args = (kwargs.pop("self"),)
        return foreach.elementwise(function, args, kwargs, writes=writes)

    return handler


def _counting(function: Any) -> Callable[..., Any]:
    """Fused kernels count no writes, nor do torch_npu's functions for lists: whoever compares versions of shards would take them for
    unwritten.
    """

    @wraps(function)
    def run(xs: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        counted = [x for x in xs if not x.is_inference()]
        before = [x._version for x in counted[:1]]
        result = function(xs, *args, **kwargs)
        if counted and counted[0]._version == before[0]:
            torch.autograd.graph.increment_version(counted)
        return result

    return run


def _norms(xs: Any, ord: Any = 2, dtype: torch.dtype | None = None) -> list[Any]:  # noqa: A002 (torch's name)
    def local_norms(local: list[torch.Tensor]) -> list[torch.Tensor]:
        if all(x.dtype.itemsize >= 4 for x in local):
            return list(torch._foreach_norm(local, ord)) if local else []
        return [torch.linalg.vector_norm(x, ord, dtype=_wide(x.dtype)) for x in local]

    if dtype is not None:
        xs = [x.to(dtype) for x in xs]
    found = foreach.norms(xs, float(ord), local_norms)
    return [norm.to(x.dtype) for norm, x in zip(found, xs, strict=True)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype
