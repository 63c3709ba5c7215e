"""The kernel of products of 16-bit matrices, in Triton: tiles come and go by the tensor memory accelerator of Hopper GPUs, which reads
either orientation, so nothing is transposed. Of a symmetric result only the tiles of the lower triangle are computed, and each is
stored twice.

[Note: tiles and bits] An element of a result is summed up over its terms in ascending order, whatever matrix it is of, and of a
symmetric result it equals its mirror image. Libraries of products choose how they add up by the number of matrices.

[Note: small tiles] Two programs with tiles of 128 x 128 run on a processor at a time, so one stores and begins while the other
multiplies. Programs that do one tile of 128 x 256 after the other are up to a tenth faster alone (NVIDIA H200), but keep
their processors until the end: beside a collective, which takes some of them, the last ones come late.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
    t, rows, cols, SIDE: tl.constexpr, GROUP: tl.constexpr, IS_SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Of tile number ``t``: the matrix, the row and the column of tiles."""
    down = tl.cdiv(rows, SIDE)
    if IS_SYMMETRIC:
        # The lower triangle, row after row.
        per_matrix = down * (down + 1) // 2
        inside = t % per_matrix
        i = ((tl.sqrt(8.0 * inside.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
        i = tl.where(i * (i + 1) // 2 > inside, i - 1, i)
        i = tl.where((i + 1) * (i + 2) // 2 <= inside, i + 1, i)
        j = inside - i * (i + 1) // 2
    else:
        # Some rows together, column after column, so that what they share is read from the cache.
        per_matrix = down * tl.cdiv(cols, SIDE)
        per_group = GROUP * tl.cdiv(cols, SIDE)
        group = t % per_matrix // per_group
        inside = t % per_matrix % per_group
        height = tl.minimum(down - group * GROUP, GROUP)
        i = group * GROUP + inside % height
        j = inside // height
    return t // per_matrix, i, j


@triton.jit(do_not_specialize=["rows", "cols", "depth"])  # type: ignore[untyped-decorator]
def product_kernel(  # type: ignore[no-untyped-def]
    x, y, addend, out, rows, cols, depth, alpha, beta,
    SIDE: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    IS_SYMMETRIC: tl.constexpr, X_TURNED: tl.constexpr, Y_TURNED: tl.constexpr, HAS_ADDEND: tl.constexpr,
):  # fmt: skip
    """A tile of ``out = x y``, or ``alpha x y + beta addend``. ``IS_SYMMETRIC``: ``x x^T`` for ``x y``. What is turned lies transposed."""
    matrix, i, j = _place(tl.program_id(0), rows, cols, SIDE, GROUP, IS_SYMMETRIC)
    row = i * SIDE
    column = j * SIDE
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for k in range(0, depth, DEPTH):
        if X_TURNED:
            left = tl.trans(x.load([matrix, k, row]).reshape(DEPTH, SIDE))
        else:
            left = x.load([matrix, row, k]).reshape(SIDE, DEPTH)
        if IS_SYMMETRIC and X_TURNED:
            right = x.load([matrix, k, column]).reshape(DEPTH, SIDE)
        elif IS_SYMMETRIC:
            right = tl.trans(x.load([matrix, column, k]).reshape(SIDE, DEPTH))
        elif Y_TURNED:
            right = tl.trans(y.load([matrix, column, k]).reshape(SIDE, DEPTH))
        else:
            right = y.load([matrix, k, column]).reshape(DEPTH, SIDE)
        total = tl.dot(left, right, total)
    if HAS_ADDEND:
        total = alpha * total + beta * addend.load([matrix, row, column]).reshape(SIDE, SIDE).to(tl.float32)
    narrow = total.to(out.dtype)
    out.store([matrix, row, column], narrow.reshape(1, SIDE, SIDE))
    if IS_SYMMETRIC:  # noqa: SIM102 - by itself, so that it is decided when the kernel is compiled
        if i != j:
            out.store([matrix, column, row], tl.trans(narrow).reshape(1, SIDE, SIDE))
