"""What several ranks have measured, as one. See [Note: ranks agree] in :mod:`hp_recompute.swapping.fitted`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hp_recompute.swapping.choices import LayerCost
from hp_recompute.swapping.timetable import Rates


@dataclass(frozen=True)
class Measured:
    """By one rank."""

    costs: tuple[LayerCost, ...]
    rates: Rates
    device_budget_bytes: int


def agree(ranks: Sequence[Measured]) -> Measured:
    """The dearest of each layer, the slowest copies and the smallest budget. ValueError for ranks with other numbers of layers."""
    numbers = [len(each.costs) for each in ranks]
    if len(set(numbers)) > 1:
        raise ValueError(
            f"swap with device_budget_bytes makes one plan for all ranks, which have {numbers} layers: give process_group, the ranks that "
            "have the same layers"
        )
    return Measured(
        tuple(_dearest([each.costs[place] for each in ranks]) for place in range(numbers[0])),
        Rates(min(each.rates.to_host for each in ranks), min(each.rates.to_device for each in ranks)),
        min(each.device_budget_bytes for each in ranks),
    )


def _dearest(costs: Sequence[LayerCost]) -> LayerCost:
    largest = max(costs, key=lambda cost: cost.nbytes)
    return LayerCost(
        largest.name,
        largest.nbytes,
        max(cost.forward_ms for cost in costs),
        min(max(cost.inputs_nbytes for cost in costs), largest.nbytes),
        largest.pieces,
    )
