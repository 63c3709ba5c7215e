"""What layers keep, swap or compute again within a budget of device memory, chosen from a measured step.

[Note: who leaves] Layers at the end stay, which backward wants first, and the last one always: how many, at most, the budget says. Of those
before them some are swapped, and the others computed again. Swapped are the first ones, whose copies have the most time, or ones
at equal distances, so that their copies lie behind the others' forward when there is no memory for several at once. What is left of the
budget lets parts of swapped layers stay. Of all such plans the one is chosen that takes the least time by
:mod:`hp_recompute.swapping.timetable`, and of equals the one that copies least. More memory never makes it slower where any part of
a layer may stay and all numbers of layers are tried: whatever the plan was for less of it is among the plans then. Of memories that move
as a whole other ones fit, and their copies may fit some percent of a step worse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hp_recompute.swapping.choices import LayerChoice, LayerCost
from hp_recompute.swapping.timetable import Rates, Timetable, timetable

_TRIED = 32
"""So many numbers of layers are tried at most: all, if there are no more."""


@dataclass(frozen=True)
class BudgetPlan:
    """What :func:`hp_recompute.swap` with ``device_budget_bytes`` has chosen; ``str()`` is a table."""

    layers: tuple[LayerChoice, ...]
    device_budget_bytes: int
    rates: Rates
    """Of copies to the host and back, as measured."""
    timetable: Timetable

    @property
    def peak_nbytes(self) -> int:
        """On the device, at most; see [Note: what counts] in :mod:`hp_recompute.swapping.timetable`."""
        return max(self.timetable.loads)

    @property
    def added_ms(self) -> float:
        """Predicted, for a step, beside one in which all stays."""
        return self.timetable.added_ms

    def __str__(self) -> str:
        mib = 2.0**20
        lines = [
            f"{'layer':<24} {'choice':<10} {'saves MiB':>10} {'stays MiB':>10} {'at most MiB':>12} {'forward ms':>11} {'copy ms':>8}"
        ]
        for each, load in zip(self.layers, self.timetable.loads, strict=True):
            copy_ms = each.moving_nbytes / self.rates.to_host
            lines.append(
                f"{each.cost.name:<24} {each.choice:<10} {each.cost.nbytes / mib:>10.2f} {each.stays_nbytes / mib:>10.2f} "
                f"{load / mib:>12.2f} {each.cost.forward_ms:>11.3f} {copy_ms:>8.3f}"
            )
        lines.append(
            f"peak {self.peak_nbytes / mib:.2f} MiB of a budget of {self.device_budget_bytes / mib:.2f} MiB; copies at "
            f"{_gib_per_s(self.rates.to_host):.1f} GiB/s, back at {_gib_per_s(self.rates.to_device):.1f} GiB/s; predicted to add "
            f"{self.added_ms:.3f} ms to a step"
        )
        return "\n".join(lines)


def choose(
    costs: Sequence[LayerCost], device_budget_bytes: int, rates: Rates, spare: float = 0.0
) -> BudgetPlan:
    """See [Note: who leaves]. ``spare``: this part of the budget is left alone. ValueError for a budget that no choice meets."""
    budget = device_budget_bytes - int(spare * device_budget_bytes)
    least = max(cost.nbytes + gradient for cost, gradient in zip(costs, _gradients(costs), strict=True))
    if least > budget:
        raise ValueError(
            f"device_budget_bytes={device_budget_bytes} is less than the {math.ceil(least / (1 - spare))} bytes that backward needs at the "
            "same time for one layer, what it saves and the gradient of its output: give more, or smaller layers or micro-batches"
        )
    best: tuple[tuple[float, int], tuple[LayerChoice, ...], Timetable] | None = None
    for again_ms, kinds in sorted(set(_kinds(costs, budget))):
        if best is not None and again_ms > best[0][0]:
            break  # computing again alone takes longer
        layers = _filled(costs, kinds, budget)
        found = timetable(layers, budget, rates)
        if found is None:
            continue
        rank = round(found.added_ms, 6), sum(each.moving_nbytes for each in layers)
        if best is None or rank < best[0]:
            best = rank, layers, found
    if best is None:
        raise AssertionError("all but the last layer can be swapped one by one")
    return BudgetPlan(best[1], device_budget_bytes, rates, best[2])


def _kinds(costs: Sequence[LayerCost], budget: int) -> Iterator[tuple[float, tuple[str, ...]]]:
    """What may become of layers, with the time that computing again takes alone."""
    num_kept, kept_nbytes = 0, 0
    for cost in reversed(costs):
        kept_nbytes = kept_nbytes + cost.nbytes
        if kept_nbytes > budget:
            break
        num_kept = num_kept + 1
    for kept in _tried(1, num_kept):
        num_leaving = len(costs) - kept
        for swapped in _tried(0, num_leaving):
            first = set(range(swapped))
            apart = {place * num_leaving // swapped for place in range(swapped)}
            for places in (first, apart):
                kinds = ["swap" if place in places else "recompute" for place in range(num_leaving)]
                again_ms = sum(
                    cost.forward_ms for cost, kind in zip(costs, kinds, strict=False) if kind == "recompute"
                )
                yield again_ms, (*kinds, *["keep"] * kept)


def _tried(least: int, most: int) -> list[int]:
    stride = -(-(most - least + 1) // _TRIED)
    return sorted({*range(least, most + 1, stride), most})


def _filled(costs: Sequence[LayerCost], kinds: Sequence[str], budget: int) -> tuple[LayerChoice, ...]:
    """What is left of the budget lets parts of swapped layers stay, the last ones first."""
    layers = [
        LayerChoice(cost, kind, cost.nbytes if kind == "keep" else 0)
        for cost, kind in zip(costs, kinds, strict=True)
    ]
    # While later layers run, what stays of this one is there beside all that is theirs.
    kept_nbytes = sum(each.stays_nbytes for each in layers)
    gradients = _gradients(costs)
    room = budget - kept_nbytes
    for place in reversed(range(len(layers))):
        each = layers[place]
        kept_nbytes = kept_nbytes - each.stays_nbytes
        if each.choice == "swap":
            stays = each.cost.fitting(room)
            choice = "keep" if stays == each.cost.nbytes else "swap"
            layers[place] = LayerChoice(each.cost, choice, stays)
            room = room - stays
        room = min(room, budget - kept_nbytes - each.cost.nbytes - gradients[place])
    return tuple(layers)


def _gradients(costs: Sequence[LayerCost]) -> list[int]:
    """Bytes of those of the layers' outputs, but for the last one's."""
    return [*(cost.inputs_nbytes for cost in costs[1:]), 0]


def _gib_per_s(bytes_per_ms: float) -> float:
    return bytes_per_ms * 1e3 / 2**30
