"""The kernel of products of 16-bit matrices, in Triton: tiles come and go by the tensor memory accelerator of Hopper GPUs, which reads
either orientation, so nothing is transposed. Of a symmetric result only the tiles of the lower triangle are computed, and each is
stored twice.

[Note: tiles and bits] An element of a result is summed up over its terms in ascending order, whatever tile it lies in, so it depends
neither on the number of matrices nor on the tiles that were chosen for that number, and of a symmetric result it equals its mirror
image. Libraries of products choose by the number.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
    t, rows, cols,
    BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, IS_SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """The matrix, first row and first column of a tile, and whether its mirror image is another one."""
    if IS_SYMMETRIC:
        # Square blocks of the lower triangle, row after row, and the tiles in each.
        SIDE: tl.constexpr = max(BM, BN)
        DOWN: tl.constexpr = SIDE // BM
        PER_BLOCK: tl.constexpr = DOWN * (SIDE // BN)
        blocks = tl.cdiv(rows, SIDE)
        per_matrix = blocks * (blocks + 1) // 2 * PER_BLOCK
        block = t % per_matrix // PER_BLOCK
        i = ((tl.sqrt(8.0 * block.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
        i = tl.where(i * (i + 1) // 2 > block, i - 1, i)
        i = tl.where((i + 1) * (i + 2) // 2 <= block, i + 1, i)
        j = block - i * (i + 1) // 2
        inside = t % PER_BLOCK
        matrix = t // per_matrix
        row = i * SIDE + inside % DOWN * BM
        column = j * SIDE + inside // DOWN * BN
        has_mirror = i != j
    else:
        down = tl.cdiv(rows, BM)
        across = tl.cdiv(cols, BN)
        r = t % (down * across)
        first = r // (GROUP * across) * GROUP
        height = tl.minimum(down - first, GROUP)
        inside = r % (GROUP * across)
        matrix = t // (down * across)
        row = (first + inside % height) * BM
        column = inside // height * BN
        has_mirror = False
    return matrix, row, column, has_mirror


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    value, addend, out, mirror, matrix, row, column, mirrored, alpha, beta,
    BM: tl.constexpr, BN: tl.constexpr, IS_SYMMETRIC: tl.constexpr, HAS_ADDEND: tl.constexpr,
):  # fmt: skip
    if HAS_ADDEND:
        value = alpha * value + beta * addend.load([matrix, row, column]).reshape(BM, BN).to(tl.float32)
    narrow = value.to(out.dtype)
    out.store([matrix, row, column], narrow.reshape(1, BM, BN))
    if IS_SYMMETRIC:
        mirror.store([mirrored, column, row], tl.trans(narrow).reshape(1, BN, BM))


@triton.jit  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    t, x, y, addend, out, mirror, count, rows, cols, depth, alpha, beta,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
    IS_SYMMETRIC: tl.constexpr, X_TURNED: tl.constexpr, Y_TURNED: tl.constexpr, HAS_ADDEND: tl.constexpr,
):  # fmt: skip
    matrix, row, column, has_mirror = _place(t, rows, cols, BM, BN, GROUP, IS_SYMMETRIC)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, depth, BK):
        if X_TURNED:
            left = tl.trans(x.load([matrix, k, row]).reshape(BK, BM))
        else:
            left = x.load([matrix, row, k]).reshape(BM, BK)
        if Y_TURNED:
            right = tl.trans(y.load([matrix, column, k]).reshape(BN, BK))
        else:
            right = y.load([matrix, k, column]).reshape(BK, BN)
        total = tl.dot(left, right, total)
    mirrored = matrix
    if IS_SYMMETRIC:
        mirrored = tl.where(has_mirror, matrix, count)  # behind the last one nothing is stored
    if PARTS == 1:
        _store(
            total, addend, out, mirror, matrix, row, column, mirrored, alpha, beta,
            BM, BN, IS_SYMMETRIC, HAS_ADDEND,
        )  # fmt: skip
    else:
        first, second = total.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
        _store(
            first, addend, out, mirror, matrix, row, column, mirrored, alpha, beta,
            BM, BN // 2, IS_SYMMETRIC, HAS_ADDEND,
        )  # fmt: skip
        _store(
            second, addend, out, mirror, matrix, row, column + BN // 2, mirrored, alpha, beta,
            BM, BN // 2, IS_SYMMETRIC, HAS_ADDEND,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count", "rows", "cols", "depth", "tiles"])  # type: ignore[untyped-decorator]
def product_kernel(  # type: ignore[no-untyped-def]
    x, y, addend, out, mirror, count, rows, cols, depth, tiles, alpha, beta,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
    IS_SYMMETRIC: tl.constexpr, X_TURNED: tl.constexpr, Y_TURNED: tl.constexpr, HAS_ADDEND: tl.constexpr,
    IS_PERSISTENT: tl.constexpr,
):  # fmt: skip
    if IS_PERSISTENT:
        # The first reads of the next tile begin below the last product of this one.
        for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            _tile(
                t, x, y, addend, out, mirror, count, rows, cols, depth, alpha, beta,
                BM, BN, BK, PARTS, GROUP, IS_SYMMETRIC, X_TURNED, Y_TURNED, HAS_ADDEND,
            )  # fmt: skip
    else:
        _tile(
            tl.program_id(0), x, y, addend, out, mirror, count, rows, cols, depth, alpha, beta,
            BM, BN, BK, PARTS, GROUP, IS_SYMMETRIC, X_TURNED, Y_TURNED, HAS_ADDEND,
        )  # fmt: skip
