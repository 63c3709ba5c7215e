"""Discrete Fourier transforms. Linear, also where only half of a spectrum is kept or taken.

A dim that is transformed is joined first: every element of a line counts in all of its results. Cuts of other dims stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.rules.along import dim_of, dims_of
from hp_dtensor.rules.labels import local_shape
from hp_dtensor.rules.rearrange import along
from hp_dtensor.rules.registry import EVERY_KIND, Outcome, rule
from hp_dtensor.spec import Spec
from hp_platform import get_platform

NORMS = (None, "backward", "ortho", "forward")

# What is done to the last dim that is transformed -> from its size, padded or cut, to the size of the result.
_LAST: dict[str, Callable[[int], int]] = {
    "": lambda n: n,
    "r": lambda n: n // 2 + 1,  # the other half are conjugates
    "ir": lambda n: n,
}
_WHAT = {
    "": "fft, ifft",
    "r": "rfft, ihfft (real numbers to half of a spectrum)",
    "ir": "irfft, hfft (half of a spectrum to real numbers)",
}


def _transformed(kind: str, x: Any, sizes: Sequence[int | None], dims: Sequence[int], norm: Any) -> Outcome:
    """Along ``dims``, padded with zeros or cut to ``sizes``; None leaves a size."""
    if norm not in NORMS:
        raise ValueError(f"norm is {norm!r}; it is one of {', '.join(map(repr, NORMS))}")
    shape = list(x.shape)
    for i, (dim, size) in enumerate(zip(dims, sizes, strict=True)):
        is_last = i == len(dims) - 1
        own = shape[dim]
        count = size if size is not None else 2 * (own - 1) if is_last and kind == "ir" else own
        if count < 1:
            raise ValueError(
                f"a transform of {count} numbers along dim {dim} of shape {x.shape}: give it a size by n= or s="
            )
        shape[dim] = _LAST[kind](count) if is_last else count
    found = along(x, dims, tuple(shape))
    assert found.output is not None
    if 0 in x.shape or 0 not in local_shape(x, found.inputs[0]):
        return found
    return replace(found, around=_of_nothing(local_shape(x, found.output, found.shape)))


def _of_nothing(shape: tuple[int, ...]) -> Callable[..., Any]:
    """Kernels refuse pieces without elements: of one line of zeros they say the dtype, and what they refuse on other ranks."""

    def around(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(local: Any, *args: Any, **kwargs: Any) -> Any:
            platform = get_platform()
            line = platform.zeros([max(n, 1) for n in local.shape], local.dtype, platform.device_of(local))
            return platform.zeros(shape, kernel(line, *args, **kwargs).dtype, platform.device_of(local))

        return run

    return around


def _checked_size(size: Any) -> Any:
    if isinstance(size, bool) or not isinstance(size, int):
        raise ValueError(f"the size of a transform must be an int, got {size!r}")
    return size


def _sizes_and_dims(x: Spec, s: Any, dim: Any) -> tuple[list[int | None], tuple[int, ...]]:
    """Of a transform along several dims: ``s`` alone means the last ones, and -1 in it a size that stays."""
    ndim = len(x.shape)
    given = (s,) if isinstance(s, int) else s
    if dim is None:
        count = ndim if given is None else len(given)
        if count > ndim:
            raise ValueError(f"s = {s!r} names more dims than a tensor of shape {x.shape} has")
        dims = tuple(range(ndim - count, ndim))
    else:
        dims = () if dim == () else dims_of(dim, ndim)
    if given is None:
        return [None] * len(dims), dims
    if len(given) != len(dims):
        raise ValueError(f"a transform needs a size for each dim, got s = {s!r} for dims {dims}")
    return [None if n == -1 else _checked_size(n) for n in given], dims


def _enter(kind: str) -> None:
    @rule(f"{kind}fft", params=("input", ("n", None), ("dim", -1), ("norm", None)))
    def one(x: Any, n: Any = None, dim: Any = -1, norm: Any = None) -> Outcome:
        dims = dim_of(dim, len(x.shape))
        if not dims:
            raise ValueError("a tensor without dims has no line to transform: give it one with unsqueeze(0)")
        return _transformed(kind, x, [None if n is None else _checked_size(n)], dims, norm)

    def several(x: Any, s: Any, dim: Any, norm: Any) -> Outcome:
        sizes, dims = _sizes_and_dims(x, s, dim)
        if kind and not dims:
            raise ValueError(f"{kind}fftn transforms at least one dim")
        return _transformed(kind, x, sizes, dims, norm)

    @rule(f"{kind}fft2", params=("input", ("s", None), ("dim", (-2, -1)), ("norm", None)))
    def two(x: Any, s: Any = None, dim: Any = (-2, -1), norm: Any = None) -> Outcome:
        return several(x, s, dim, norm)

    @rule(f"{kind}fftn", params=("input", ("s", None), ("dim", None), ("norm", None)))
    def many(x: Any, s: Any = None, dim: Any = None, norm: Any = None) -> Outcome:
        return several(x, s, dim, norm)

    for plan, where in (
        (one, "one dim"),
        (two, "the last two dims, or ``dim``"),
        (many, "all dims, or ``dim``"),
    ):
        plan.__doc__ = f"{_WHAT[kind]} along {where}."


for _kind in _LAST:
    _enter(_kind)


@rule("fftshift", params=("input", ("dim", None)), carries=EVERY_KIND)
def fftshift(x: Any, dim: Any = None) -> Outcome:
    """fftshift, ifftshift: rolled by half of the size, along all dims or ``dim``, which are joined."""
    ndim = len(x.shape)
    return along(x, range(ndim) if dim is None else dims_of(dim, ndim), x.shape)
