"""Muon of one process in its simplest form: numpy, whole parameters, one matrix at a time. What sharded ones are compared with.

    oracle = Muon({"w": array, ...}, lr=0.02)
    oracle.step({"w": gradient, ...})       # a parameter without a gradient, or with None, stays as it is
    oracle.params["w"], oracle.momentum["w"]

All arithmetic is in ``dtype`` (float64 unless told otherwise), that of Newton-Schulz in ``ns_dtype``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

FIVE = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
Index = tuple[Any, ...]


def newton_schulz(
    x: np.ndarray, triples: Sequence[Sequence[float]] = FIVE, steps: int = 5, margin: float = 1.0
) -> np.ndarray:
    """Of one matrix, in its own dtype; the last triple again beyond their number."""
    number = x.dtype.type
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (np.sqrt((x * x).sum(dtype=x.dtype)) * number(margin) + number(1e-7))
    for step in range(steps):
        a, b, c = (number(value) for value in triples[min(step, len(triples) - 1)])
        square = x @ x.T
        x = a * x + (b * square + c * (square @ square)) @ x
    return x.T if tall else x


def polar(x: np.ndarray) -> np.ndarray:
    """The nearest orthogonal matrix, to which Newton-Schulz comes near."""
    u, _, v = np.linalg.svd(x, full_matrices=False)
    return u @ v


def sinkhorn(x: np.ndarray, steps: int = 5) -> np.ndarray:
    """Rows and columns of equal lengths, in turns; none of them may be zero."""
    for _ in range(steps):
        x = x / np.sqrt((x * x).mean(1, keepdims=True))
        x = x / np.sqrt((x * x).mean(0, keepdims=True))
    return x


def blocks(shape: tuple[int, ...]) -> list[Index]:
    """Where the matrices of a parameter of this shape are: its experts, or all of it."""
    return [(e,) for e in range(shape[0])] if len(shape) == 3 and shape[1] != 1 else [(...,)]


def rows(*sizes: int) -> Callable[[tuple[int, ...]], list[Index]]:
    """For parameters whose rows (dim -2) hold several matrices of these sizes."""
    stops = np.cumsum(sizes)
    parts = [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
    return lambda shape: [(*lead, part) for lead in np.ndindex(shape[:-2]) for part in parts]


def cols(*sizes: int) -> Callable[[tuple[int, ...]], list[Index]]:
    """The same of columns."""
    return lambda shape: [
        (*index[:-1], slice(None), index[-1]) for index in rows(*sizes)((*shape[:-2], *shape[:-3:-1]))
    ]


class Muon:
    """The optimizer. ``cut`` names parameters whose matrices are not those of :func:`blocks`, each with what gives them."""

    def __init__(
        self,
        params: Mapping[str, np.ndarray],
        *,
        lr: float = 0.02,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        matched_adamw_rms: float = 0.2,
        triples: Sequence[Sequence[float]] = FIVE,
        margin: float = 1.0,
        ns_steps: int = 5,
        transform: Callable[[np.ndarray], np.ndarray] | None = None,
        scale: Callable[[int, int], float] | None = None,
        cut: Mapping[str, Callable[[tuple[int, ...]], list[Index]]] | None = None,
        dtype: str = "float64",
        ns_dtype: str | None = None,
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.ns_dtype = np.dtype(ns_dtype or dtype)
        self.params = {name: np.array(value, self.dtype) for name, value in params.items()}
        self.momentum = {name: np.zeros_like(value) for name, value in self.params.items()}
        self.lr, self.weight_decay, self.mu, self.nesterov = lr, weight_decay, momentum, nesterov
        self.triples, self.margin, self.ns_steps, self.cut = triples, margin, ns_steps, dict(cut or {})
        self.transform = transform or (
            lambda matrix: newton_schulz(matrix, self.triples, self.ns_steps, self.margin)
        )
        self.scale = scale or (lambda rows, cols: matched_adamw_rms * max(rows, cols) ** 0.5)

    def step(self, grads: Mapping[str, np.ndarray | None]) -> None:
        """Of all parameters with a gradient."""
        number = self.dtype.type
        for name, p in self.params.items():
            if grads.get(name) is None:
                continue
            g = np.asarray(grads[name], self.dtype)
            buf = number(self.mu) * self.momentum[name] + g
            self.momentum[name] = buf
            u = number(self.mu) * buf + g if self.nesterov else buf
            p = p * number(1 - self.lr * self.weight_decay)
            for index, matrix in self.matrices(name, u):
                matrix = matrix.astype(self.ns_dtype)
                update = self.transform(matrix)
                factor = number(self.lr * self.scale(*matrix.shape))
                p[index] = p[index] - factor * update.astype(self.dtype).reshape(p[index].shape)
            self.params[name] = p

    def matrices(self, name: str, x: np.ndarray) -> Iterator[tuple[Index, np.ndarray]]:
        """Where the matrices of ``x`` are, and what they are."""
        if x.size:
            for index in self.cut.get(name, blocks)(x.shape):
                yield index, x[index].reshape(x[index].shape[0], -1)
