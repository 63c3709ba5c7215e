"""Draws and dropout on cuda in one launch each, by Triton. Imported where Triton is installed and used first."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from hp_platform.draws import Distribution, Region
from hp_platform.torch._triton_draws import draw_kernel, dropout_kernel, masked_kernel

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
    constants: tuple[int, int, bool]
    """Its ``ROWS, BLOCKS, IS_WIDE``."""

    @property
    def num_blocks(self) -> int:
        """Of all tiles together."""
        rows, blocks, _ = self.constants
        return self.grid[0] * rows * blocks


@dataclass(frozen=True)
class _Drop:
    """What a region and a probability fix of launches of dropout: everything but the tensors and the place in the stream."""

    tiling: _Tiling
    threshold: int
    scale: float
    is_nothing: bool
    """No element exists, or none is kept."""
    compiled: dict[Hashable, Callable[..., Any]] = field(default_factory=dict)
    """Launches by what a compiled kernel depends on besides: kernel, device, dtype, alignment."""


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
        kind = _KINDS[distribution.kind]
        _on(
            device,
            draw_kernel[tiling.grid],
            (*arguments, kind, *tiling.constants),
            {"enable_fp_fusion": False},
        )
        return out

    def dropout(
        self, x: torch.Tensor, p: float, seed: int, stream: int, region: Region, *, with_mask: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """The result, and with ``with_mask`` what :meth:`masked` takes, a byte for four elements; None where the kernel lacks
        the dtype or cannot step through the region. One launch; reads ``x`` and writes the result.
        """
        if x.dtype not in _DROPPED:
            return None
        drop = _kept(self._drops, (region, p), self._prepared)
        if drop is None:
            return None
        if drop.is_nothing:
            return torch.zeros_like(x, memory_format=torch.contiguous_format), None
        x = x.contiguous()
        out = torch.empty_like(x)
        tiling = drop.tiling
        mask = (
            torch.empty(tiling.num_blocks, dtype=torch.uint8, device=x.device)
            if with_mask
            else out  # not looked at
        )
        arguments = (x, out, mask, *tiling.numbers, *_signed_words(seed, stream), drop.threshold, drop.scale)
        _launch(drop, dropout_kernel, x, arguments, (*tiling.constants, with_mask))
        return out, mask if with_mask else None

    def masked(self, x: torch.Tensor, mask: torch.Tensor, p: float, region: Region) -> torch.Tensor:
        """What :meth:`dropout` with these gives for ``x`` of the same dtype, by its mask. One launch."""
        drop = self._drops.get((region, p)) or self._prepared((region, p))
        assert drop is not None
        x = x.contiguous()
        out = torch.empty_like(x)
        arguments = (x, out, mask, *drop.tiling.numbers, drop.scale)
        _launch(drop, masked_kernel, x, arguments, drop.tiling.constants)
        return out

    def _prepared(self, key: tuple[Region, float]) -> _Drop | None:
        region, p = key
        tiling = _kept(self._tilings, region, _tiling)
        if tiling is None:
            return None
        threshold = Distribution.event(p).threshold
        is_nothing = tiling.grid == (0,) or threshold == 2**32  # beyond every word of 32 bits
        scale = 0.0 if is_nothing else 1.0 / (1.0 - p)
        return _Drop(tiling, _signed(threshold), scale, is_nothing)


def _launch(
    drop: _Drop, kernel: Any, x: torch.Tensor, arguments: tuple[Any, ...], constants: tuple[Any, ...]
) -> None:
    """Launch what was compiled for such a call before, which costs the host half as much as asking Triton to find it."""
    device = x.device
    # Memory that torch has allocated begins at multiples of 512; x may be part of something.
    key = (kernel, device.index, x.dtype, x.data_ptr() % 16 == 0, constants)
    found = drop.compiled.get(key)
    arguments = (*arguments, *constants)
    if found is not None:
        _on(device, found, arguments, {})
        return

    def first(*arguments: Any) -> None:
        compiled = kernel[drop.tiling.grid](*arguments, enable_fp_fusion=False)
        drop.compiled[key] = compiled[(drop.tiling.grid[0], 1, 1)]

    _on(device, first, arguments, {})


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
        return _Tiling((0,), (), (1, 1, False))
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
        constants=(rows, blocks, is_wide),
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
