"""Newton-Schulz iterations: matrices whose singular values become about 1, by products of matrices alone.

For a matrix ``X (m, n)`` with ``m <= n``, divided by its Frobenius norm + 1e-7, each step with its triple ``(a, b, c)`` is

    A = X X^T,    X <- a X + (b A + c A^2) X

and for ``m > n`` the same from the other side, ``A = X^T X``, ``X <- a X + X (b A + c A^2)``, which is what transposing before and
after gives, without the transposed copies. A step of a batch is three launches: a product, and two products with an addition. ``A``
and ``A^2`` are symmetric, so half of each does: where the platform has kernels for that, a step takes (3 m^2 n + m^3) / 2 multiplications
instead of 2 m^2 n + m^3.

[Note: batches and bits] A batch of matrices is one launch per product. What a matrix becomes does not depend on the others
beside it, and equal batches give equal bits. In 16 bits on Hopper GPUs, for ``min(m, n) >= 1536``, it does not depend on their
number either: these products are kernels of our own. But libraries of products choose how they add up by the number of matrices too:
MKL in float64 does it in another way for one than for several, cuBLAS for every number, MindSpore for long vectors. So in
another batch a matrix may become another one by rounding of the dtype: 1e-15 in float64, 1e-6 in float32. Who needs the same bits
keeps the batches the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from hp_optim.muon.coefficients import DEFAULT_SET, Coefficients, Triple, coefficients_of
from hp_optim.muon.iteration import divisor, iterated
from hp_platform.platform import Platform, get_platform
from hp_platform.protocols.device import Repeated
from hp_platform.repeated import WorkAsItIs

EPSILON: Final = 1e-7
"""Added to the norm, so that a matrix of zeros stays one."""
MEMORY_CAP: Final = 2**30
"""Bytes of working memory of a batch, where the caller names no other bound."""


def newton_schulz(
    x: Any,
    *,
    coefficients: str | Coefficients | Sequence[Sequence[float]] | Sequence[float] = DEFAULT_SET,
    steps: int = 5,
    dtype: Any = None,
) -> Any:
    """Orthogonalise a batch of matrices. No communication, no host synchronisation, nothing recorded; ``x`` stays as it is.

    Args:
        x: a plain tensor ``(b, m, n)`` of a floating dtype; any size may be 0 or 1, and a batch may lie transposed.
        coefficients: a name of :data:`~hp_optim.muon.coefficients.COEFFICIENT_SETS`, triples, or one triple for all steps.
        steps: how many iterations, at least 1; beyond the end of the set its last triple repeats.
        dtype: in which floating dtype the products are made (the norm in float32, of or for float64 in float64). None: bfloat16 where
            the device of ``x`` computes it, else float32.

    Returns:
        A new tensor ``(b, m, n)`` of that dtype. If ``U S V^T`` is the decomposition of a matrix, it becomes about ``U S' V^T`` with
        ``S'`` in the interval that the set documents; zeros become zeros. NaN or infinity make the whole matrix NaN, the
        others of the batch not. In float32 and narrower dtypes entries beyond 1e19, whose squares are infinite, give zeros.

    ValueError for another number of dims, a dtype that is not floating, unknown coefficients, ``steps < 1``.
    """
    platform = get_platform()
    return newton_schulz_again(platform, WorkAsItIs(), x, coefficients=coefficients, steps=steps, dtype=dtype)


def newton_schulz_again(
    platform: Platform,
    repeated: Repeated,
    x: Any,
    *,
    coefficients: str | Coefficients | Sequence[Sequence[float]] | Sequence[float] = DEFAULT_SET,
    steps: int = 5,
    dtype: Any = None,
) -> Any:
    """:func:`newton_schulz` of what comes again in the same memory, as in a loop: then the products are one launch."""
    if x.ndim != 3:
        raise ValueError(
            f"newton_schulz takes a batch of matrices (b, m, n), got a tensor of shape {tuple(x.shape)}: reshape one matrix "
            "to (1, m, n)"
        )
    found = coefficients_of(coefficients)
    triples = found.of_steps(steps)
    wanted = compute_dtype(platform, x, dtype)
    if 0 in x.shape:
        return platform.zeros(tuple(x.shape), wanted, platform.device_of(x))
    with platform.no_grad():
        exact = any(platform.itemsize(each) > 4 for each in (wanted, x.dtype))
        norm = platform.norm(x, (1, 2), keepdim=True, dtype="float64" if exact else "float32")
        if platform.supports("out_products", platform.device_of(x)):
            name = (newton_schulz, triples, found.margin, wanted)
            return iterated(platform, repeated, name, x, norm, wanted, triples, found.margin, EPSILON)
        return _iterated(
            platform, platform.quotient(x, divisor(platform, norm, found.margin, EPSILON), wanted), triples
        )


def compute_dtype(platform: Platform, x: Any, dtype: Any = None) -> Any:
    """The dtype that :func:`newton_schulz` computes in, as the framework's object. ValueError unless it is a floating one."""
    if not platform.is_floating(x.dtype):
        raise ValueError(
            f"newton_schulz takes floating numbers, got a tensor of {platform.dtype_name(x.dtype)}"
        )
    if dtype is None:
        narrow = platform.supports("bfloat16_compute", platform.device_of(x))
        return platform.dtype("bfloat16" if narrow else "float32")
    if not platform.is_floating(dtype):
        raise ValueError(
            f"ns_dtype is {platform.dtype_name(dtype)}; expected a floating one: 'bfloat16', 'float16', 'float32' or 'float64'"
        )
    return platform.dtype(dtype)


def _iterated(platform: Platform, x: Any, triples: Iterable[Triple]) -> Any:
    """In new memory at every step."""
    is_wide = x.shape[1] <= x.shape[2]
    for a, b, c in triples:
        gram = platform.gram(x if is_wide else platform.transpose(x, 1, 2))
        inner = platform.square_add(gram, alpha=c, beta=b)
        x = platform.matmul_add(x, inner, x, beta=a) if is_wide else platform.matmul_add(x, x, inner, beta=a)
    return x


def working_bytes(shape: Sequence[int], from_itemsize: int, itemsize: int) -> int:
    """Bytes that a matrix ``(m, n)`` takes in a batch at most: stacked, normalised, two iterates and two squares.

    ``from_itemsize``: bytes of a number of the given matrix; ``itemsize``: of one that is computed with.
    """
    rows, cols = shape
    small = min(rows, cols)
    return rows * cols * (from_itemsize + 4 + 2 * itemsize) + 2 * small * small * itemsize


def batches(
    shapes: Sequence[Sequence[int]], from_itemsize: int, itemsize: int, memory_cap: int = MEMORY_CAP
) -> list[list[int]]:
    """Places in ``shapes`` (matrices ``(m, n)``), put together to batches of equal shapes that stay below a cap in bytes.

    In the order in which the shapes first occur; a matrix that is larger than the cap by itself is a batch of its own. So the
    batches depend on the shapes alone. ValueError for a cap below 1.
    """
    if memory_cap < 1:
        raise ValueError(
            f"memory_cap is {memory_cap!r}; expected bytes, at least 1, as the usual {MEMORY_CAP}"
        )
    places: dict[tuple[int, ...], list[int]] = {}
    for place, shape in enumerate(shapes):
        places.setdefault(tuple(shape), []).append(place)
    found: list[list[int]] = []
    for shape, equal in places.items():
        count = max(1, memory_cap // max(1, working_bytes(shape, from_itemsize, itemsize)))
        found.extend(equal[start : start + count] for start in range(0, len(equal), count))
    return found


def orthogonalize(
    matrices: Sequence[Any],
    *,
    coefficients: str | Coefficients | Sequence[Sequence[float]] | Sequence[float] = DEFAULT_SET,
    steps: int = 5,
    dtype: Any = None,
    memory_cap: int = MEMORY_CAP,
) -> list[Any]:
    """:func:`newton_schulz` of matrices ``(m, n)`` of any shapes on one device; those of one shape together, below the cap.

    ``memory_cap`` bounds the bytes of working memory of a batch beside the results (default 1 GiB); results do not depend on it
    but for [Note: batches and bits]. Returns tensors ``(m, n)`` in the order given, those of a batch views of one tensor.
    """
    found: dict[int, Any] = {}
    for places, results in orthogonalized_batches(
        matrices, coefficients=coefficients, steps=steps, dtype=dtype, memory_cap=memory_cap
    ):
        found.update(zip(places, results, strict=True))
    return [found[place] for place in range(len(matrices))]


def orthogonalized_batches(
    matrices: Sequence[Any],
    *,
    coefficients: str | Coefficients | Sequence[Sequence[float]] | Sequence[float] = DEFAULT_SET,
    steps: int = 5,
    dtype: Any = None,
    memory_cap: int = MEMORY_CAP,
) -> Iterator[tuple[list[int], list[Any]]]:
    """As :func:`orthogonalize`, a batch at a time: the places of its matrices among those given, and what they became."""
    if not matrices:
        return
    platform = get_platform()
    for matrix in matrices:
        if matrix.ndim != 2:
            raise ValueError(
                f"orthogonalize takes matrices (m, n), got a tensor of shape {tuple(matrix.shape)}"
            )
    itemsize = platform.itemsize(compute_dtype(platform, matrices[0], dtype))
    shapes = [tuple(matrix.shape) for matrix in matrices]
    for places in batches(shapes, platform.itemsize(matrices[0].dtype), itemsize, memory_cap):
        shape = shapes[places[0]]
        rows = [platform.reshape(matrices[place], (1, *shape)) for place in places]
        batch = rows[0] if len(rows) == 1 else platform.cat(rows)
        result = newton_schulz(batch, coefficients=coefficients, steps=steps, dtype=dtype)
        pieces = platform.split(result, [1] * len(places))
        yield places, [platform.reshape(piece, shape) for piece in pieces]
