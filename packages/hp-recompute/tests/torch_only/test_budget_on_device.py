"""What layers take of a budget, by the device's own allocator: where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from hp_platform.testing import World, distributed
from hp_recompute import swap
from hp_recompute.swapping import fitted
from hp_recompute.swapping.timetable import Rates

NUM_LAYERS = 8
ROWS_AND_WIDTH = {"cuda": (2048, 1024), "npu": (128, 64)}
PARTS = {"cuda": (0.75, 0.5, 0.4), "npu": (0.5,)}
"""Of what all layers save."""


class Block(nn.Module):
    """Saves ten times its argument: that, its sine, and twice four times as much."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x.sin())))


class Model:
    """With gradients that are there all the time."""

    def __init__(self, world: World) -> None:
        torch.manual_seed(0)
        self.handle = world.platform.device(world.device)
        with torch.device(world.device):
            rows, width = ROWS_AND_WIDTH[world.device_type]
            self.blocks = [Block(width) for _ in range(NUM_LAYERS)]
            self.x = torch.randn(rows, width, requires_grad=True)
        self.gradient = torch.ones_like(self.x)
        self.leaves = [self.x, *(p for block in self.blocks for p in block.parameters())]

    def forward(self) -> torch.Tensor:
        x = self.x
        for block in self.blocks:
            x = block(x)
        return x

    def step(self) -> None:
        self.forward().backward(self.gradient)

    def gradients(self) -> list[Any]:
        for leaf in self.leaves:
            leaf.grad = None
        self.step()
        return [leaf.grad.clone() for leaf in self.leaves]

    def peak(self) -> int:
        for _ in range(2):
            self.step()
        self.handle.synchronize()
        self.handle.reset_peak_memory()
        self.step()
        self.handle.synchronize()
        return self.handle.max_memory_allocated()

    def saved(self) -> int:
        """Of all layers; the output is nobody's."""
        before = self.handle.memory_allocated()
        y = self.forward()
        return self.handle.memory_allocated() - before - y.untyped_storage().nbytes()


@contextmanager
def slow_link(nbytes: float) -> Iterator[None]:
    """As if a layer of so many bytes took 1 ms forward, and 6.5 to copy."""
    real, rates = fitted._cost, Rates(nbytes / 6.5, nbytes / 6.5)
    with (
        mock.patch.object(fitted, "_cost", lambda *args: replace(real(*args), forward_ms=1.0)),
        mock.patch.object(fitted, "_rates", return_value=rates),
    ):
        yield


@distributed(world_size=1, backends=["cuda", "npu"], timeout=120)
def test_a_budget_is_landed_within_5_percent_by_the_allocator(world: World) -> None:
    model = Model(world)
    expected = model.gradients()
    plain_peak, saved = model.peak(), model.saved()
    all_of_them = 10 * NUM_LAYERS * model.x.numel() * model.x.element_size()
    assert 0.95 * all_of_them <= saved <= 1.05 * all_of_them
    beside = plain_peak - saved  # parameters, gradients, and what a layer makes while it runs
    for part, is_slow in (*((part, False) for part in PARTS[world.device_type]), (0.5, True)):
        budget = int(part * saved)
        with slow_link(saved / NUM_LAYERS) if is_slow else nullcontext():
            plan = swap(model.blocks, model.step, device_budget_bytes=budget)
        assert not is_slow or "recompute" in {each.choice for each in plan.layers}
        landed = model.peak() - beside
        assert abs(landed - plan.peak_nbytes) <= 0.05 * budget, (landed, str(plan))
        assert landed <= budget, (landed, str(plan))
        assert landed >= 0.95 * budget, (landed, str(plan))
        for one, other in zip(model.gradients(), expected, strict=True):
            assert torch.equal(one, other)
