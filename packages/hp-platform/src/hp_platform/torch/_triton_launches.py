"""Draws and dropout on cuda in one launch each, by Triton. Imported where Triton is installed and used first."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hp_platform.draws import Distribution, Region
from hp_platform.torch._triton_draws import draw_kernel, dropout_kernel

_BLOCKS_PER_PROGRAM = 512  # 2048 elements by 128 threads
_LEVELS = 3
_KINDS = {"uniform": 0, "normal": 1}
_DROPPED = frozenset({torch.float32, torch.float16, torch.bfloat16})  # float64 would lose digits
_MOST_KEPT = 4096  # regions of a program are few; one whose shapes never repeat does not fill the memory

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True)
class _Tiling:
    """How the programs of a grid share the elements of a region; none where ``grid`` is (0,)."""

    grid: tuple[int]
    numbers: tuple[int, ...]
    """The kernel's ``length, count, per_row, base, n1, d1, n2, d2, d3``."""
    constants: dict[str, int]


@dataclass(frozen=True)
class _Drop:
    """What a region and a probability fix of a launch of dropout: everything but the tensors and the place in the stream."""

    launch: Callable[..., Any] | None
    """None where no element exists, or none is kept."""
    numbers: tuple[int, ...]
    more: tuple[Any, ...]
    constants: dict[str, Any]


class TritonDraws:
    """The draws of one kind of device. What a region fixes of a launch is worked out once: the host is slower than the kernel."""

    def __init__(self) -> None:
        self._tilings: dict[Region, _Tiling | None] = {}
        self._drops: dict[tuple[Region, float], _Drop | None] = {}

    def draw(
        self, distribution: Distribution, seed: int, stream: int, region: Region, device: torch.device
    ) -> torch.Tensor | None:
        """See :class:`hp_platform.protocols.RandomOps`; None where the kernel lacks the kind or cannot step through the region.

        One launch, and a copy of three numbers to the device.
        """
        if distribution.kind not in _KINDS or distribution.dtype != "float32":
            return None
        tiling = _kept(self._tilings, region, _tiling)
        if tiling is None:
            return None
        out = torch.empty(region.size, dtype=getattr(torch, distribution.result), device=device)
        if tiling.grid == (0,):
            return out
        # float64 arguments of a kernel would arrive in float32.
        numbers = [
            distribution.shift,
            distribution.scale,
            min(distribution.largest, float(torch.finfo(torch.float32).max)),
        ]
        parameters = torch.tensor(numbers, dtype=torch.float64, device=device)
        arguments = (out, parameters, *tiling.numbers, *_signed_words(seed, stream))
        constants = {**tiling.constants, "KIND": _KINDS[distribution.kind]}
        _on(device, draw_kernel[tiling.grid], arguments, constants)
        return out

    def dropout(
        self, x: torch.Tensor, p: float, seed: int, stream: int, region: Region
    ) -> torch.Tensor | None:
        """See :class:`hp_platform.protocols.RandomOps`; None where the kernel lacks the dtype or cannot step through the region.

        One launch; reads ``x`` and writes the result.
        """
        if x.dtype not in _DROPPED:
            return None
        drop = _kept(self._drops, (region, p), self._prepared)
        if drop is None:
            return None
        if drop.launch is None:
            return torch.zeros_like(x, memory_format=torch.contiguous_format)
        x = x.contiguous()
        out = torch.empty_like(x)
        arguments = (x, out, *drop.numbers, *_signed_words(seed, stream), *drop.more)
        _on(x.device, drop.launch, arguments, drop.constants)
        return out

    def _prepared(self, key: tuple[Region, float]) -> _Drop | None:
        region, p = key
        tiling = _kept(self._tilings, region, _tiling)
        if tiling is None:
            return None
        threshold = Distribution.event(p).threshold
        is_nothing = tiling.grid == (0,) or threshold == 2**32  # beyond every word of 32 bits
        return _Drop(
            launch=None if is_nothing else dropout_kernel[tiling.grid],
            numbers=tiling.numbers,
            more=(_signed(threshold), 0.0 if is_nothing else 1.0 / (1.0 - p)),
            constants=tiling.constants,
        )


def _kept(made: dict[K, V], key: K, make: Callable[[K], V]) -> V:
    try:
        return made[key]
    except KeyError:
        if len(made) >= _MOST_KEPT:
            made.clear()
        made[key] = value = make(key)
        return value


def _tiling(region: Region) -> _Tiling | None:
    """None for a region of more levels of steps than the kernels have."""
    runs = region.runs()
    if len(runs.outer) > _LEVELS:
        return None
    if runs.count == 0 or runs.length == 0:
        return _Tiling((0,), (), {})
    levels = (*((1, 0),) * (_LEVELS - len(runs.outer)), *runs.outer)
    (_, d1), (n2, d2), (n3, d3) = levels
    # Tiles of one row where rows are long, of many rows where they are short.
    blocks = min(_BLOCKS_PER_PROGRAM, 2 ** math.ceil(math.log2(-(-runs.length // 4) + 1)))
    rows = max(1, min(_BLOCKS_PER_PROGRAM // blocks, 2 ** math.ceil(math.log2(runs.count))))
    is_aligned = runs.base % 4 == 0 and all(distance % 4 == 0 for _, distance in runs.outer)
    per_row = -(-(runs.length + (0 if is_aligned else 3)) // (4 * blocks))
    # Offsets of a tile's last, empty part come up to its size beyond the end.
    is_wide = (runs.count + rows) * (runs.length + 4 * blocks) >= 2**31
    return _Tiling(
        grid=(-(-runs.count // rows) * per_row,),
        numbers=(runs.length, runs.count, per_row, runs.base, n2, d1, n3, d2, d3),
        constants={"ROWS": rows, "BLOCKS": blocks, "IS_WIDE": is_wide, "enable_fp_fusion": False},
    )


def _signed(word: int) -> int:
    """The 32 bits as a signed number, so that an argument of a kernel has one type whatever its value."""
    return word - 2**32 if word >= 2**31 else word


def _signed_words(seed: int, stream: int) -> tuple[int, ...]:
    return (
        _signed(seed & 0xFFFFFFFF),
        _signed(seed >> 32 & 0xFFFFFFFF),
        _signed(stream & 0xFFFFFFFF),
        _signed(stream >> 32 & 0xFFFFFFFF),
    )


def _on(
    device: torch.device, launch: Callable[..., Any], arguments: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    if device.index is None or device.index == torch.accelerator.current_device_index():
        launch(*arguments, **constants)
    else:
        with torch.accelerator.device_index(device.index):
            launch(*arguments, **constants)
