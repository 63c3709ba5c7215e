"""Products of matrices and vectors, and rows by number."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor

from hp_dtensor._mindspore.composed.arithmetic import scaled
from hp_platform import get_platform


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """Of matrices, batches of them and vectors."""
    made: Tensor = get_platform().matmul(x, y)
    return made


def outer(x: Tensor, y: Tensor) -> Tensor:
    """``x[i] y[j]``."""
    return x.reshape((-1, 1)) * y.reshape((1, -1))


def added(x: Tensor, a: Tensor, b: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """``beta x + alpha a b``: addmm, addmv, baddbmm."""
    return scaled(x, beta) + scaled(matmul(a, b), alpha)


def addbmm(x: Tensor, a: Tensor, b: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """``beta x + alpha sum(a b)`` over the batch."""
    return scaled(x, beta) + scaled(get_platform().sum(matmul(a, b), 0), alpha)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of ``weight``."""
    made: Tensor = get_platform().embedding(ids, weight)
    return made
