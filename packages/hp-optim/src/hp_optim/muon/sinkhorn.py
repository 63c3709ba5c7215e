"""Rows and columns of equal length, in the place of singular values of 1: the square-root Sinkhorn iteration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hp_platform.platform import get_platform


def sinkhorn(steps: int = 5) -> Sinkhorn:
    """A function for ``Muon(ns_transform_fn=...)`` that brings rows and columns of matrices to equal lengths (SR-Sinkhorn of Scetbon,
    Ma, Gong, Meeds, "Gradient Multi-Normalization for Stateless and Scalable LLM Training", arXiv 2502.06742).

    For a matrix ``X (rows, cols)`` each step is::

        X[i, :] <- X[i, :] / (|X[i, :]| / sqrt(cols))      for every row i
        X[:, j] <- X[:, j] / (|X[:, j]| / sqrt(rows))      for every column j

    with 2-norms. So columns come out with the norm ``sqrt(rows)`` and, more nearly with each step, rows with ``sqrt(cols)``; rows and
    columns of zeros stay zeros.

    Args:
        steps: how often both are done, at least 1.

    **Scale.** All entries together have the root mean square 1 (an orthogonal matrix has ``1 / sqrt(max(rows, cols))``, which is what the
    usual ``scale`` of Muon is made for). With ``scale=lambda rows, cols: 0.2`` updates have the size of AdamW's, so that its learning rate
    and weight decay can be kept, as with Muon's own. With ``scale="none"`` that is 0.2 of AdamW's learning rate and 5 times its weight decay,
    which is multiplied by the rate. The usual ``"match_rms_adamw"`` makes updates ``sqrt(max(rows, cols))`` times too large: 64 times for 4096.
    ``Muon(momentum=0.0, nesterov=False, ...)`` is the paper's step, whose gradients are normalised as they are.

    The function takes and returns a plain tensor ``(b, rows, cols)`` of a floating dtype, computes in float32 (of float64 in float64), and
    rounds to the dtype of its argument, which stays as it is. No communication; nothing is recorded; the host does not wait. NaN or
    infinity make the whole matrix NaN, the others of the stack not. Columns whose entries are all below 1e-19 of the largest in their
    rows count as zeros in 32 bits, and stay as small as they are. Two of them with the same ``steps`` are equal, and can be pickled.

    ValueError unless ``steps`` is a whole number of at least 1; from the function for another number of dims or a dtype that is not floating.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        given = repr(steps) if isinstance(steps, (int, float, str)) else f"a {type(steps).__qualname__}"
        raise ValueError(
            f"sinkhorn: steps is {given}; expected a whole number of at least 1. It makes the function that is given to the optimizer: "
            "Muon(..., ns_transform_fn=sinkhorn())"
        )
    return Sinkhorn(steps)


@dataclass(frozen=True)
class Sinkhorn:
    """The function that :func:`sinkhorn` gives."""

    steps: int

    def __post_init__(self) -> None:
        # As ranks compare it: with another number of steps it is another function.
        object.__setattr__(self, "__qualname__", f"sinkhorn(steps={self.steps})")

    def __call__(self, x: Any) -> Any:
        """Of a stack of matrices; see :func:`sinkhorn`."""
        platform = get_platform()
        if x.ndim != 3 or not platform.is_floating(x.dtype):
            raise ValueError(
                f"sinkhorn takes a stack of matrices (b, rows, cols) of floating numbers, got shape {tuple(x.shape)} and "
                f"{platform.dtype_name(x.dtype)}: reshape one matrix to (1, rows, cols)"
            )
        if 0 in x.shape:
            return platform.clone(x)
        with platform.no_grad():
            wide = platform.cast(x, "float64" if platform.itemsize(x.dtype) > 4 else "float32")
            # The lengths of rows do not count; so they are not too small or too large to be squared.
            wide = wide / _nonzero(platform.amax(abs(wide), 2, keepdim=True))
            for _ in range(self.steps):
                for dim in (2, 1):
                    norm = platform.norm(wide, dim, keepdim=True)
                    wide = wide / _nonzero(platform.mul_(norm, 1 / math.sqrt(x.shape[dim])))
            return platform.cast(wide, x.dtype)


def _nonzero(divisor: Any) -> Any:
    """1 where it is 0; NaN stays."""
    return divisor + get_platform().cast(divisor == 0, divisor.dtype)
