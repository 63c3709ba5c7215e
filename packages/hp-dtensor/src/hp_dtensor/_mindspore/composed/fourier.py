"""Fourier transforms on cpu, made of MindSpore's four along one dim.

Those have right gradients. Of its others on cpu ``hfft`` and ``fftshift`` have wrong ones from the second call on, ``ihfft``
always, and ``irfftn`` with sizes ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore
from mindspore import mint, ops

Tensor = Any
_COMPLEX = (mindspore.complex64, mindspore.complex128)
_SWAPPED = {None: "forward", "backward": "forward", "forward": "backward", "ortho": "ortho"}
"""A transform in the other direction has its factor where this one has none."""


def hfft(x: Tensor, n: int | None = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """Real numbers of half of a spectrum, forwards."""
    return ops.irfft(_conj(x), n, dim, _SWAPPED[norm])


def ihfft(x: Tensor, n: int | None = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """Half of a spectrum of real numbers, backwards."""
    return ops.conj(ops.rfft(x, n, dim, _SWAPPED[norm]))


def _conj(x: Tensor) -> Tensor:
    return ops.conj(x) if x.dtype in _COMPLEX else x


ALONG_ONE: dict[str, Callable[..., Tensor]] = {
    "fft": ops.fft,
    "ifft": ops.ifft,
    "rfft": ops.rfft,
    "irfft": ops.irfft,
    "hfft": hfft,
    "ihfft": ihfft,
}


def along_several(name: str, x: Tensor, s: Any = None, dim: Any = None, norm: str | None = None) -> Tensor:
    """The transform ``name`` along one dim after the other; of half of a spectrum the last dim comes first, or last."""
    sizes, dims = _sizes_and_dims(x, s, dim)
    if not dims:
        return x if x.dtype in _COMPLEX else x.astype(_complex_of(x))
    # What goes backwards and by its conjugates: hfft has the direction of fft.
    others = ops.ifft if name in ("ifft", "irfft", "ihfft") else ops.fft
    own = (ALONG_ONE[name], sizes[-1], dims[-1])
    rest = [(others, size, at) for size, at in zip(sizes[:-1], dims[:-1], strict=True)]
    for transform, size, at in [*rest, own] if name in ("irfft", "hfft") else [own, *rest]:
        x = transform(x, size, at, norm)
    return x


def _complex_of(x: Tensor) -> Any:
    return mindspore.complex128 if x.dtype == mindspore.float64 else mindspore.complex64


def _sizes_and_dims(x: Tensor, s: Any, dim: Any) -> tuple[list[int | None], list[int]]:
    given = None if s is None else [s] if isinstance(s, int) else list(s)
    if dim is None:
        dims = list(range(x.ndim - (x.ndim if given is None else len(given)), x.ndim))
    else:
        dims = [dim] if isinstance(dim, int) else list(dim)
    sizes: list[int | None] = [None if n == -1 else n for n in given or [-1] * len(dims)]
    return sizes, dims


def shifted(x: Tensor, dim: Any, is_inverse: bool) -> Tensor:
    """fftshift, ifftshift."""
    dims: Sequence[int] = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    for at in dims:
        size = x.shape[at]
        front = size // 2 if is_inverse else (size + 1) // 2  # roll has no kernel
        if front and size - front:
            x = mint.cat([mint.narrow(x, at, front, size - front), mint.narrow(x, at, 0, front)], at)
    return x
