"""What is compared in the rows of `recompute`, and what each is to reach. Needs no framework."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from bench.models.sizes import SIZES, Sizes

# Times of one machine scatter by so much from round to round.
SCATTER = 1.01
# Of the time that save_on_cpu adds; of the time without saving, where copies fit behind the forward; and of a budget.
OF_ADDED, OF_PLAIN, OF_BUDGET = 1 / 3, 1.05, 0.95


class Side(enum.Enum):
    """How the layers' intermediate results are kept for backward."""

    PLAIN = "plain"
    """All on the device."""
    FULL = "checkpoint"
    SELECTIVE = "checkpoint, matmuls kept"
    SWAP = "swap"
    FITTING = "swap, as fits"
    """Of as many layers as the copies of fit behind the forward; the others are plain."""
    MIXED = "swap and checkpoint"
    """Every second layer."""
    BUDGET_75 = "swap, budget of 75 %"
    """Each layer keeps, swaps or recomputes, as fits in so much of what all of them save."""
    BUDGET_50 = "swap, budget of 50 %"
    BUDGET_30 = "swap, budget of 30 %"
    TORCH_FULL = "torch checkpoint"
    TORCH_SELECTIVE = "torch checkpoint, matmuls kept"
    TORCH_SWAP = "torch save_on_cpu"
    TORCH_MIXED = "torch save_on_cpu and checkpoint"


PARTS: dict[Side, float] = {Side.BUDGET_75: 0.75, Side.BUDGET_50: 0.5, Side.BUDGET_30: 0.3}
"""Of what all layers save."""


@dataclass(frozen=True)
class Setting:
    """One row: ours beside torch's."""

    name: str
    ours: Side
    peer: Side
    """PLAIN where torch has nothing like it."""

    @property
    def sides(self) -> tuple[Side, ...]:
        """What must be measured for it."""
        return tuple(dict.fromkeys((Side.PLAIN, self.ours, self.peer)))


SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting("full", Side.FULL, Side.TORCH_FULL),
        Setting("selective", Side.SELECTIVE, Side.TORCH_SELECTIVE),
        Setting("swap", Side.SWAP, Side.TORCH_SWAP),
        Setting("swap-fitting", Side.FITTING, Side.PLAIN),
        Setting("mixed", Side.MIXED, Side.TORCH_MIXED),
        Setting("budget-75", Side.BUDGET_75, Side.PLAIN),
        Setting("budget-50", Side.BUDGET_50, Side.PLAIN),
        Setting("budget-30", Side.BUDGET_30, Side.PLAIN),
    )
}
ON_GPU = replace(SIZES["8b"], layers=8, length=8192)
ON_HOST = replace(SIZES["tiny"], layers=4)


def sizes_for(num_gpus: int, layers: int | None = None, length: int | None = None) -> Sizes:
    """Of the layers: those of Llama 8 B on a GPU, tiny ones without; other numbers of layers or tokens if they are given."""
    sizes = ON_GPU if num_gpus else ON_HOST
    return replace(sizes, layers=layers or sizes.layers, length=length or sizes.length)
