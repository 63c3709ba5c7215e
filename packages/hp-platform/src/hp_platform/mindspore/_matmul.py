"""Matrix products by the two kernels whose gradients are right: of two matrices, and of two equal batches of matrices.

The gradient of ``mint.matmul`` on CPU has a wrong shape, or raises, for batches and broadcasting where sizes of 1 occur:
``(1, 1, 5) @ (5, 1)`` sends back ``(1, 1, 1, 5)``.
"""

from __future__ import annotations

import math

import mindspore
from mindspore import mint

from hp_platform.mindspore._empty import constant_if_empty
from hp_platform.mindspore._recording import no_grad
from hp_platform.mindspore._write import exact_number, write


@constant_if_empty
def matmul(x: mindspore.Tensor, y: mindspore.Tensor) -> mindspore.Tensor:
    """``x @ y`` as numpy has it: vectors, matrices, and batches of them that broadcast."""
    if x.ndim == 0 or y.ndim == 0:
        raise ValueError(
            f"matmul takes vectors and matrices, got shapes {tuple(x.shape)} and {tuple(y.shape)}"
        )
    rows = x.reshape((1, *x.shape)) if x.ndim == 1 else x
    columns = y.reshape((*y.shape, 1)) if y.ndim == 1 else y
    if rows.shape[-1] != columns.shape[-2]:
        raise ValueError(
            f"matmul of shapes {tuple(x.shape)} and {tuple(y.shape)}: the inner sizes "
            f"{rows.shape[-1]} and {columns.shape[-2]} differ"
        )
    product = _matrices(rows, columns)
    outer = product.shape[:-2]
    kept = (*outer, *(rows.shape[-2:-1] if x.ndim > 1 else ()), *(columns.shape[-1:] if y.ndim > 1 else ()))
    return product if product.shape == kept else product.reshape(kept)


def matmul_into(
    out: mindspore.Tensor, x: mindspore.Tensor, y: mindspore.Tensor, add: mindspore.Tensor | None = None
) -> mindspore.Tensor:
    """A product, and what is added to it, written where it is wanted."""
    if out.dtype != x.dtype:
        x, y = x.astype(out.dtype), y.astype(out.dtype)
    with no_grad():
        product = matmul(x, y)
        write(out, product if add is None else add + product)
    return out


def matmul_add(
    add: mindspore.Tensor,
    x: mindspore.Tensor,
    y: mindspore.Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> mindspore.Tensor:
    """A product of batches and what is added to it, both scaled."""
    with no_grad():
        product = matmul(x, y)
        product = product if alpha == 1 else product * exact_number(alpha, product.dtype)
        return (add if beta == 1 else add * exact_number(beta, add.dtype)) + product


def _matrices(x: mindspore.Tensor, y: mindspore.Tensor) -> mindspore.Tensor:
    if y.ndim == 2:
        flat = x if x.ndim == 2 else x.reshape((math.prod(x.shape[:-1]), x.shape[-1]))
        product = mint.matmul(flat, y)
        return product if x.ndim == 2 else product.reshape((*x.shape[:-1], y.shape[-1]))
    batch = _broadcast(x.shape[:-2], y.shape[:-2])
    product = mint.bmm(_batches(x, batch), _batches(y, batch))
    return product.reshape((*batch, x.shape[-2], y.shape[-1]))


def _batches(x: mindspore.Tensor, batch: tuple[int, ...]) -> mindspore.Tensor:
    if x.shape[:-2] != batch:
        x = mint.broadcast_to(x, (*batch, *x.shape[-2:]))
    return x.reshape((math.prod(batch), *x.shape[-2:]))


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    ndim = max(len(a), len(b))
    pairs = zip((1,) * (ndim - len(a)) + tuple(a), (1,) * (ndim - len(b)) + tuple(b), strict=True)
    found = []
    for m, n in pairs:
        if m != n and 1 not in (m, n):
            raise ValueError(f"matmul: the batches {tuple(a)} and {tuple(b)} do not broadcast")
        found.append(n if m == 1 else m)
    return tuple(found)
