"""Launches of Triton kernels by what a compiled kernel depends on: looking for it again costs the host more than the launch."""

from __future__ import annotations

from typing import Any

import torch


class KeptKernel:
    """A kernel whose parameters are tensors, then whole numbers, then fractions, then constants."""

    def __init__(self, kernel: Any, num_warps: int) -> None:
        self._kernel = kernel
        self._num_warps = num_warps
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self,
        grid: int,
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[int, ...],
        fractions: tuple[float, ...],
        constants: tuple[Any, ...],
    ) -> None:
        """Launch ``grid`` programs on the device of the first tensor; nothing if there are none."""
        if grid == 0:
            return
        device = tensors[0].device
        # Of each argument by itself: a kernel compiled for an aligned one, or for 1, must not get another.
        key = (
            constants,
            device,
            *[(x.dtype, x.data_ptr() % 16 == 0) for x in tensors],
            *[(n == 1, n % 16 == 0, -(2**31) <= n < 2**31) for n in numbers],
        )
        arguments = (*tensors, *numbers, *fractions, *constants)
        if device.type == "cpu" or device.index == torch.accelerator.current_device_index():
            self._launch(key, (grid, 1, 1), arguments)  # on a cpu: Triton's interpreter
            return
        with torch.accelerator.device_index(device.index):
            self._launch(key, (grid, 1, 1), arguments)

    def _launch(self, key: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        found = self._compiled.get(key)
        if found is None:
            self._compiled[key] = self._kernel[grid](*arguments, num_warps=self._num_warps)
        else:
            found[grid](*arguments)
