"""What layers keep, swap or compute again within a budget of device memory, chosen from a measured step.

[Note: what counts] A layer's bytes are those that swap could free: what it saves for backward and nobody else holds. While a layer runs, in
forward and in backward, there are on the device what stays of the layers up to it, and what moves of it and of the one before. The
largest such sum is the peak.

[Note: who leaves] The last layer always stays. Then, from the last to the first, as much stays as the budget allows: backward wants the
last ones first, so copies of the first ones have the most time. Of layers that leave, the first ones are swapped as long as their copies fit
behind the forward, and further ones if a copy is shorter than their forward; else they are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class LayerCost:
    """Of one layer in one step."""

    name: str
    nbytes: int
    """See [Note: what counts]."""
    forward_ms: float
    """Of its forward."""


@dataclass(frozen=True)
class LayerChoice:
    """What becomes of what a layer saves."""

    cost: LayerCost
    choice: str
    """``"keep"``, ``"swap"`` (what does not stay) or ``"recompute"``."""
    stays_nbytes: int
    """Of its bytes."""

    @property
    def moving_nbytes(self) -> int:
        """That are on the device for a while."""
        return self.cost.nbytes - self.stays_nbytes


@dataclass(frozen=True)
class BudgetPlan:
    """What :func:`hp_recompute.swap` with ``device_budget_bytes`` has chosen; ``str()`` is a table."""

    layers: tuple[LayerChoice, ...]
    device_budget_bytes: int
    copy_bytes_per_ms: float
    """Measured, from the device to the host."""

    @property
    def peak_nbytes(self) -> int:
        """On the device, at most."""
        return max(loads(self.layers))

    def __str__(self) -> str:
        mib = 2.0**20
        lines = [
            f"{'layer':<24} {'choice':<10} {'saves MiB':>10} {'stays MiB':>10} {'forward ms':>11} {'copy ms':>8}"
        ]
        for each in self.layers:
            copy_ms = each.moving_nbytes / self.copy_bytes_per_ms if each.choice == "swap" else 0.0
            lines.append(
                f"{each.cost.name:<24} {each.choice:<10} {each.cost.nbytes / mib:>10.2f} {each.stays_nbytes / mib:>10.2f} "
                f"{each.cost.forward_ms:>11.3f} {copy_ms:>8.3f}"
            )
        lines.append(
            f"peak {self.peak_nbytes / mib:.2f} MiB of a budget of {self.device_budget_bytes / mib:.2f} MiB; "
            f"copies at {self.copy_bytes_per_ms * 1e3 / 2**30:.1f} GiB/s"
        )
        return "\n".join(lines)


def loads(layers: Sequence[LayerChoice]) -> list[int]:
    """Bytes on the device while each of them runs; see [Note: what counts]."""
    stay = accumulate(each.stays_nbytes for each in layers)
    moving = [each.moving_nbytes for each in layers]
    return [stays + one + before for stays, one, before in zip(stay, moving, [0, *moving[:-1]], strict=True)]


def choose(costs: Sequence[LayerCost], device_budget_bytes: int, copy_bytes_per_ms: float) -> BudgetPlan:
    """See [Note: who leaves]. ValueError for a budget that no choice meets."""
    layers = [LayerChoice(cost, "swap", 0) for cost in costs]
    layers[-1] = LayerChoice(costs[-1], "keep", costs[-1].nbytes)
    least = max(loads(layers))
    if least > device_budget_bytes:
        raise ValueError(
            f"device_budget_bytes={device_budget_bytes} is less than the {least} bytes that two neighbouring layers need at the same time: "
            "give more, or smaller layers or micro-batches"
        )
    for place in reversed(range(len(costs) - 1)):
        # What stays of a layer instead of moving is there all the same while it and the next one run, and more while later ones do.
        room = device_budget_bytes - max(loads(layers)[place + 2 :], default=0)
        stays = min(room, costs[place].nbytes)
        choice = "keep" if stays == costs[place].nbytes else "swap"
        layers[place] = LayerChoice(costs[place], choice, stays)
    hidden = copy_bytes_per_ms * sum(cost.forward_ms for cost in costs)
    for place, each in enumerate(layers):
        if each.choice != "swap":
            continue
        hidden = hidden - each.moving_nbytes
        copy_ms = each.moving_nbytes / copy_bytes_per_ms
        if hidden < 0 and each.stays_nbytes == 0 and copy_ms > each.cost.forward_ms:
            layers[place] = LayerChoice(each.cost, "recompute", 0)
            hidden = hidden + each.moving_nbytes
    return BudgetPlan(tuple(layers), device_budget_bytes, copy_bytes_per_ms)
