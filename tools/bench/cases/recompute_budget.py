"""On a rank: layers under a budget of memory, and how much of it they take by the GPU's allocator.

[Note: what a budget takes] At its peak a step takes what the layers have saved, and what it takes besides: parameters, gradients, the
input, and what a layer makes while it runs. The latter is the peak of the plain layers less all that they save, which is what is
allocated more after a forward than before it, but for the output. So what layers take under a budget is their peak less the
latter. Gradients are there all the time, on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench.cases.recompute_measured import Budget
from bench.cases.recompute_settings import PARTS, Side
from bench.cases.recompute_sides import Called, Layer, Layers
from hp_recompute import BudgetPlan, swap

_WARM = 2


def budgeted(layers: Layers, side: Side) -> tuple[list[Layer], BudgetPlan | None]:
    """The layers under the side's budget; as they are (None) where nothing is swapped."""
    around: list[Layer] = [Called(block) for block in layers.blocks]
    if layers.x.device.type == "cpu":
        return around, None
    budget = max(int(PARTS[side] * saved_bytes(layers)), _largest(layers))
    return around, swap(around, lambda: layers.step(around), device_budget_bytes=budget)


def saved_bytes(layers: Layers) -> int:
    """That all blocks save for backward, by the allocator. The first forward may allocate what stays."""
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        y = layers.forward(layers.blocks)
        saved = torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes()
        del y
    return saved


def _largest(layers: Layers) -> int:
    """Of a budget that a layer alone fits in, some more: they are all alike."""
    return int(1.1 * saved_bytes(layers) / len(layers.blocks))


def landed(layers: Layers, side: Side) -> Budget | None:
    """None where nothing is swapped."""
    called, plan = budgeted(layers, side)
    if plan is None:
        return None
    plain_peak = _peak(layers, layers.blocks)
    saved = saved_bytes(layers)
    peak = _peak(layers, called)
    for leaf in layers.leaves:
        leaf.grad = None
    return Budget(
        plan.device_budget_bytes,
        peak - (plain_peak - saved),
        saved,
        plan.added_ms,
        tuple(each.choice for each in plan.layers),
    )


def _peak(layers: Layers, called: Sequence[Layer]) -> int:
    for _ in range(_WARM):
        layers.step(called, keeps_gradients=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    layers.step(called, keeps_gradients=True)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
