"""Builtins of torch without a rule that are short programs of others that have one: each formula stands here.

They are what ``torch.nn.utils.parametrizations.weight_norm`` calls.
"""

from __future__ import annotations

from typing import Any

import torch


def norm_except_dim(v: Any, pow: int = 2, dim: int = 0) -> Any:  # noqa: A002 (torch's name)
    """``torch.norm_except_dim``: the norm over all dims but one, which are kept with size 1; over all for ``dim`` -1."""
    if dim == -1:
        return torch.linalg.vector_norm(v, pow)
    others = [d for d in range(v.ndim) if d != dim]
    return torch.linalg.vector_norm(v, pow, others, keepdim=True) if others else v.abs()


def weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    """``torch._weight_norm``: ``v`` with norms ``g``."""
    return v * (g / norm_except_dim(v, 2, dim))


HANDLERS: dict[Any, Any] = {torch.norm_except_dim: norm_except_dim, torch._weight_norm: weight_norm}
"""Functions of torch that are answered here."""
