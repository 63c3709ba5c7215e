"""Functions on lists of tensors that torch does not have as one call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hp_platform.torch._dtypes import resolve

_HALF = (torch.float16, torch.bfloat16)


def scale_(xs: Sequence[torch.Tensor], factor: torch.Tensor, *, fused: bool) -> None:
    """Multiply each of ``xs``, which have one dtype, by a 0-d tensor of another one. ``fused``: on a device that can."""
    if fused and xs[0].dtype in _HALF:
        # The product of lists would round the factor to the tensors' dtype before, and take a launch per tensor. What gradient
        # scalers call does neither; what it finds out about infinities is not asked for here.
        found_inf = torch.zeros((), dtype=torch.float32, device=xs[0].device)
        torch._amp_foreach_non_finite_check_and_unscale_(list(xs), found_inf, factor.float())
    elif xs[0].dtype in _HALF:
        torch._foreach_copy_(xs, [x.to(factor.dtype).mul_(factor) for x in xs])
    else:
        torch._foreach_mul_(xs, factor.to(xs[0].dtype))


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
