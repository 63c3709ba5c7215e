"""Functions on lists of tensors that torch does not have as one call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hp_platform.torch._dtypes import resolve

MOST_WIDENED = 2**24
"""Elements of 16-bit lists that are multiplied in float32 at once: 64 MB, but for a single larger tensor."""


def scale_(xs: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each of ``xs``, which have one dtype, by a 0-d tensor of another one.

    The product of a 16-bit list and a number would round the number to 16 bits before: an error of up to 0.4 % that all elements
    have alike. So those are widened, some at a time.
    """
    if xs[0].itemsize >= factor.itemsize:
        torch._foreach_mul_(xs, factor.to(xs[0].dtype))
        return
    for some in _portions(xs):
        wide = [torch.empty_like(x, dtype=factor.dtype) for x in some]
        torch._foreach_copy_(wide, some)
        torch._foreach_mul_(wide, factor)
        torch._foreach_copy_(some, wide)


def _portions(xs: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """One after the other, of at most :data:`MOST_WIDENED` elements or one tensor."""
    some: list[torch.Tensor] = []
    num = 0
    for x in xs:
        if some and num + x.numel() > MOST_WIDENED:
            yield some
            some, num = [], 0
        some.append(x)
        num = num + x.numel()
    yield some


def norms(xs: Sequence[torch.Tensor], p: float, dtype: Any) -> torch.Tensor:
    """The p-norm of each, as one vector."""
    wanted = resolve(dtype)
    with torch.no_grad():
        # torch refuses the largest and the smallest of nothing.
        full = [x for x in xs if x.numel()] if p < 0 or p == math.inf else xs
        found = torch._foreach_norm(full, p, dtype=None if xs[0].dtype == wanted else wanted) if full else ()
        if len(full) == len(xs):
            return torch.stack(found)
        nothing = torch.full((), 0.0 if p > 0 else math.inf, dtype=wanted, device=xs[0].device)
        known = iter(found)
        return torch.stack([next(known) if x.numel() else nothing for x in xs])
