"""The kernels of draws and of dropout in Triton; :mod:`hp_platform.torch._triton_launches` launches them.

The values are those of :mod:`hp_platform.draws`, to the bit: the same cipher, and for numbers the same float64 arithmetic in
the same order, with the fusion of products and sums turned off.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NOT_SPECIALIZED = ["key0", "key1", "stream0", "stream1"]


@triton.jit  # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
    length, count, per_row, base, n1, d1, n2, d2, d3,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    """Blocks (ROWS, BLOCKS) of a tile; offsets in the local tensor (ROWS, BLOCKS, 4), and which of them exist.

    A program's four words per block stay in one thread. The grid has one axis: the others are short on some devices.
    """
    row = tl.program_id(0) // per_row * ROWS + tl.arange(0, ROWS)
    local = tl.program_id(0) % per_row * BLOCKS + tl.arange(0, BLOCKS)
    wide = row.to(tl.int64)
    start = base + wide // (n1 * n2) * d1 + wide // n2 % n1 * d2 + wide % n2 * d3
    lead = (start % 4)[:, None, None]
    if IS_WIDE:
        row = wide
        local = local.to(tl.int64)
    else:
        lead = lead.to(tl.int32)
    column = (local * 4)[None, :, None] + tl.arange(0, 4)[None, None, :] - lead
    exists = (column >= 0) & (column < length) & (row < count)[:, None, None]
    return (start // 4)[:, None] + local[None, :], row[:, None, None] * length + column, exists


@triton.jit
def _words(block, key0, key1, stream0, stream1):  # type: ignore[no-untyped-def]
    """Philox-4x32-10; see :mod:`hp_platform.philox`.

    What is the same for all elements (the key, and at first half of the counter) stays a scalar, and high and low half come
    of one product of 64 bits: the products are what takes the time.
    """
    c0 = block.to(tl.uint32)
    c1 = (block >> 32).to(tl.uint32)
    c2 = stream0.to(tl.uint32, bitcast=True)
    c3 = stream1.to(tl.uint32, bitcast=True)
    k0 = key0.to(tl.uint32, bitcast=True)
    k1 = key1.to(tl.uint32, bitcast=True)
    m0 = tl.full((), 0xD2511F53, tl.uint64)
    m1 = tl.full((), 0xCD9E8D57, tl.uint64)
    step0 = tl.full((), 0x9E3779B9, tl.uint32)
    step1 = tl.full((), 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * m0
        product1 = c2.to(tl.uint64) * m1
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product1.to(tl.uint32)
        c3 = product0.to(tl.uint32)
        k0 = k0 + step0
        k1 = k1 + step1
    return c0, c1, c2, c3


@triton.jit  # type: ignore[untyped-decorator]
def _in_turn(a, b, c, d, ROWS: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, BLOCKS, 4))


@triton.jit(do_not_specialize=[*_NOT_SPECIALIZED, "threshold"])  # type: ignore[untyped-decorator]
def dropout_kernel(  # type: ignore[no-untyped-def]
    x, out, mask, length, count, per_row, base, n1, d1, n2, d2, d3, key0, key1, stream0, stream1, threshold, scale,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, IS_WIDE: tl.constexpr, WRITES_MASK: tl.constexpr,
):  # fmt: skip
    """``mask``, if it is written, has a byte for each block of a tile: its four low bits say which elements are kept."""
    blocks, offset, exists = _place(length, count, per_row, base, n1, d1, n2, d2, d3, ROWS, BLOCKS, IS_WIDE)
    value = tl.load(x + offset, mask=exists)  # comes while words are made
    w0, w1, w2, w3 = _words(blocks, key0, key1, stream0, stream1)
    least = threshold.to(tl.uint32, bitcast=True)
    k0, k1, k2, k3 = w0 >= least, w1 >= least, w2 >= least, w3 >= least
    if WRITES_MASK:
        bits = k0.to(tl.uint8) | (k1.to(tl.uint8) << 1) | (k2.to(tl.uint8) << 2) | (k3.to(tl.uint8) << 3)
        tl.store(mask + _block_of_tile(ROWS, BLOCKS, IS_WIDE), bits)
    kept = _in_turn(k0, k1, k2, k3, ROWS, BLOCKS)
    tl.store(
        out + offset, tl.where(kept, value.to(tl.float32) * scale, 0.0).to(out.dtype.element_ty), mask=exists
    )


@triton.jit  # type: ignore[untyped-decorator]
def masked_kernel(  # type: ignore[no-untyped-def]
    x, out, mask, length, count, per_row, base, n1, d1, n2, d2, d3, scale,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    """What :func:`dropout_kernel` does, by the mask that it has written."""
    _, offset, exists = _place(length, count, per_row, base, n1, d1, n2, d2, d3, ROWS, BLOCKS, IS_WIDE)
    value = tl.load(x + offset, mask=exists)
    bits = tl.load(mask + _block_of_tile(ROWS, BLOCKS, IS_WIDE))
    kept = _in_turn((bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0, ROWS, BLOCKS)
    tl.store(
        out + offset, tl.where(kept, value.to(tl.float32) * scale, 0.0).to(out.dtype.element_ty), mask=exists
    )


@triton.jit  # type: ignore[untyped-decorator]
def _block_of_tile(ROWS: tl.constexpr, BLOCKS: tl.constexpr, IS_WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the mask has the blocks of this program's tile, (ROWS, BLOCKS): tiles follow each other, whole."""
    program = tl.program_id(0)
    if IS_WIDE:
        program = program.to(tl.int64)
    return (program * ROWS + tl.arange(0, ROWS))[:, None] * BLOCKS + tl.arange(0, BLOCKS)[None, :]


@triton.jit
def _log_of_word(word):  # type: ignore[no-untyped-def]
    """``log((word + 1) / 2**32)``: :func:`hp_platform.draws.elementary.log` with 6 terms."""
    bits = (word.to(tl.int64) + 1).to(tl.float64).to(tl.int64, bitcast=True)
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    is_large = mantissa > 1.4142135623730951
    mantissa = tl.where(is_large, mantissa * 0.5, mantissa)
    exponent = (bits >> 52) - 1055
    exponent = tl.where(is_large, exponent + 1, exponent).to(tl.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    series = z * (2.0 / 11) + (2.0 / 9)
    series = series * z + (2.0 / 7)
    series = series * z + (2.0 / 5)
    series = series * z + (2.0 / 3)
    series = series * z + 2.0
    return s * series + exponent * 0.6931471805599453


@triton.jit
def _normal_pair(first, second):  # type: ignore[no-untyped-def]
    """Box-Muller: :func:`hp_platform.draws.elementary.cos_and_sin` with 6 terms."""
    n = second.to(tl.int64)
    quarter = (n + 0x20000000) >> 30
    x = (n - quarter * 0x40000000).to(tl.float64) * (1.0 / 0x40000000) * 1.5707963267948966
    z = x * x
    cos = z * (-1.0 / 3628800) + (1.0 / 40320)
    cos = cos * z + (-1.0 / 720)
    cos = cos * z + (1.0 / 24)
    cos = cos * z + (-1.0 / 2)
    cos = cos * z + 1.0
    sin = z * (-1.0 / 39916800) + (1.0 / 362880)
    sin = sin * z + (-1.0 / 5040)
    sin = sin * z + (1.0 / 120)
    sin = sin * z + (-1.0 / 6)
    sin = x * (sin * z + 1.0)
    is_odd = (quarter & 1) == 1
    turned_cos = tl.where(is_odd, sin, cos)
    turned_sin = tl.where(is_odd, cos, sin)
    turned_cos = tl.where(((quarter + 1) & 2) == 2, -turned_cos, turned_cos)
    turned_sin = tl.where((quarter & 2) == 2, -turned_sin, turned_sin)
    radius = tl.sqrt(_log_of_word(first) * -2.0)
    return radius * turned_cos, radius * turned_sin


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)  # type: ignore[untyped-decorator]
def draw_kernel(  # type: ignore[no-untyped-def]
    out, parameters, length, count, per_row, base, n1, d1, n2, d2, d3, key0, key1, stream0, stream1,
    KIND: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    blocks, offset, exists = _place(length, count, per_row, base, n1, d1, n2, d2, d3, ROWS, BLOCKS, IS_WIDE)
    w0, w1, w2, w3 = _words(blocks, key0, key1, stream0, stream1)
    shift, factor, largest = tl.load(parameters), tl.load(parameters + 1), tl.load(parameters + 2)
    if KIND == 0:
        words = _in_turn(w0, w1, w2, w3, ROWS, BLOCKS)
        z = (words >> 8).to(tl.float64) * (1.0 / 0x1000000)
    else:
        z0, z1 = _normal_pair(w0, w1)
        z2, z3 = _normal_pair(w2, w3)
        z = _in_turn(z0, z1, z2, z3, ROWS, BLOCKS)
    value = (z * factor + shift).to(tl.float32)
    if KIND == 0:
        most = largest.to(tl.float32)
        value = tl.where(value < most, value, most)
    tl.store(out + offset, value.to(out.dtype.element_ty), mask=exists)
