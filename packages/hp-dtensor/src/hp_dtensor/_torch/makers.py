"""Functions of torch that make tensors, where what they make is written into a DTensor."""

from __future__ import annotations

from typing import Any

import torch

from hp_dtensor.dtensor import DTensorMethods


def eye(n: int, m: int | None = None, *, out: Any, requires_grad: bool = False, **_: Any) -> Any:
    """``torch.eye(n, m, out=x)``, as ``nn.init.eye_`` calls it: every rank writes its piece, without communication."""
    shape = (n, n if m is None else m)
    is_dtensor = isinstance(out, DTensorMethods)
    if not is_dtensor or tuple(out.shape) != shape:
        raise ValueError(
            f"out= of torch.eye must be a DTensor of shape {shape}, got shape {tuple(out.shape)}"
        )
    out.zero_()
    return out.fill_diagonal_(1)


MAKERS = {torch.eye: eye}
"""Function of torch -> what runs instead of it."""
