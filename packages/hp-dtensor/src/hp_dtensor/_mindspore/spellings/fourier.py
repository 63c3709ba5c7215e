"""Fourier transforms: MindSpore gives numbers for the words of ``norm``."""

from __future__ import annotations

from functools import partial
from typing import Any

from hp_dtensor._mindspore.composed import fourier as composed
from hp_dtensor._mindspore.spelling import Operation, is_on_cpu, spelling
from hp_dtensor._names.fourier import PRIMITIVES

NORMS = {None: None, 0: "backward", 1: "forward", 2: "ortho"}


def _transform(rule: str, primitive: str) -> None:
    name = primitive.lower()
    on_cpu = composed.ALONG_ONE.get(name) or partial(composed.along_several, name[:-1])

    @spelling(rule, primitive)
    def read(operation: Operation, x: Any, size: Any = None, dim: Any = None, norm: Any = None) -> Any:
        def local(own: Any, size: Any, dim: Any, word: Any) -> Any:
            if is_on_cpu(own):
                return on_cpu(own, size, dim, word)
            return operation.native(own, size, dim, norm)

        return operation.follow(rule, local, x, size, dim, NORMS[norm])


def _shift(primitive: str) -> None:
    @spelling("fftshift", primitive)
    def read(operation: Operation, x: Any, dim: Any = None) -> Any:
        def local(own: Any, dim: Any) -> Any:
            if is_on_cpu(own):
                return composed.shifted(own, dim, primitive == "IFFTShift")
            return operation.native(own, dim)

        return operation.follow("fftshift", local, x, dim)


for _rule, _names in PRIMITIVES.items():
    for _name in _names.split():
        _shift(_name) if _rule == "fftshift" else _transform(_rule, _name)
