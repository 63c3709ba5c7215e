"""The rows of `recompute`: ours, torch's and the plain layers of one setting."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from bench.cases.recompute_measured import Budget, Found, Measured
from bench.cases.recompute_settings import OF_ADDED, OF_BUDGET, OF_PLAIN, PARTS, SCATTER, Setting, Side
from bench.conditions import Conditions
from bench.models.sizes import Sizes

MIB = 2**20
COLUMNS = (
    "row",
    "plain ms",
    "ours ms",
    "torch ms",
    "peak MiB plain",
    "peak MiB ours",
    "peak MiB torch",
    "copies that fit",
    "budget MiB",
    "landed MiB",
    "landed / budget",
    "predicted to add ms",
    "goals",
    "reached",
    "apart",
    "hardware",
    "versions",
    "commit",
)
HEADER = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


@dataclass(frozen=True)
class Row:
    """Medians over the rounds, and the conditions they were measured under."""

    setting: Setting
    sizes: Sizes
    found: Found
    rounds: int
    conditions: Conditions

    @property
    def plain(self) -> Measured:
        """Nothing saved."""
        return self.found.sides[Side.PLAIN]

    @property
    def ours(self) -> Measured:
        """Of this library."""
        return self.found.sides[self.setting.ours]

    @property
    def peer(self) -> Measured | None:
        """None where torch has nothing like it."""
        return None if self.setting.peer is Side.PLAIN else self.found.sides[self.setting.peer]

    @property
    def budget(self) -> Budget | None:
        """None where there is none, or memory is not counted."""
        return self.found.budgets.get(self.setting.ours)

    @property
    def goals(self) -> dict[str, bool | None]:
        """Every goal of the row, and whether it is reached; None where that was not measured."""
        ours, peer, plain = self.ours, self.peer, self.plain
        if self.setting.ours in PARTS:
            within = None if self.budget is None else OF_BUDGET <= self.budget.ratio <= 1
            return {f"{OF_BUDGET:g} to 1 of the budget": within, "peak <= plain's": _kept(ours, plain)}
        if peer is None:
            goals: dict[str, bool | None] = {
                f"<= {OF_PLAIN:g} x plain": ours.milliseconds <= OF_PLAIN * plain.milliseconds
            }
            return goals | {"peak <= plain's": _kept(ours, plain)}
        if self.setting.ours is Side.SWAP:
            bound = OF_ADDED * (peer.milliseconds - plain.milliseconds)
            goals = {"adds <= 1/3 of torch's": ours.milliseconds - plain.milliseconds <= bound}
        else:
            goals = {f"<= {SCATTER:g} x torch's": ours.milliseconds <= SCATTER * peer.milliseconds}
        return goals | {"peak <= plain's": _kept(ours, plain)}

    @property
    def reached(self) -> bool:
        """No goal that was measured is missed."""
        return all(kept is not False for kept in self.goals.values())

    def to_json(self) -> str:
        """As one line of JSON, with nothing rounded."""
        values = {
            "case": f"recompute {self.setting.name}",
            "ours": self.setting.ours.value,
            "peer": None if self.peer is None else self.setting.peer.value,
            "sizes": asdict(self.sizes),
            "rounds": self.rounds,
            "share": asdict(self.found.share) | {"value": self.found.share.value},
            "num_fitting": self.found.num_fitting,
            "budget": None if self.budget is None else asdict(self.budget) | {"ratio": self.budget.ratio},
            "goals": self.goals,
            "reached": self.reached,
            "apart": {side.value: apart for side, apart in self.found.apart.items()},
            "sides": {side.value: asdict(self.found.sides[side]) for side in self.setting.sides},
            "conditions": asdict(self.conditions),
        }
        return json.dumps(values, sort_keys=True)

    def to_table_row(self) -> str:
        """For a Markdown table under HEADER."""
        words = {True: "yes", False: "no", None: "not measured"}
        sides = (self.plain, self.ours, self.peer)
        share = self.found.share.value
        cells = (
            self.setting.name,
            *("-" if side is None else f"{side.milliseconds:.2f}" for side in sides),
            *(_mebibytes(side) for side in sides),
            f"{share:.2f} ({self.found.num_fitting} of {self.sizes.layers} layers)",
            *_budget_cells(self.budget),
            ", ".join(self.goals),
            ", ".join(words[kept] for kept in self.goals.values()),
            f"{self.found.apart[self.setting.ours]:.1e}",
            self.conditions.hardware,
            ", ".join(f"{name} {version}" for name, version in self.conditions.versions.items()),
            self.conditions.commit,
        )
        return f"| {' | '.join(cells)} |"


def _kept(ours: Measured, bound: Measured) -> bool | None:
    if ours.peak_bytes is None or bound.peak_bytes is None:
        return None
    return ours.peak_bytes <= bound.peak_bytes


def _budget_cells(budget: Budget | None) -> tuple[str, ...]:
    if budget is None:
        return ("-",) * 4
    return (
        f"{budget.budget_bytes / MIB:.0f}",
        f"{budget.landed_bytes / MIB:.0f}",
        f"{budget.ratio:.3f}",
        f"{budget.predicted_milliseconds:.2f}",
    )


def _mebibytes(side: Measured | None) -> str:
    return "-" if side is None or side.peak_bytes is None else f"{side.peak_bytes / MIB:.0f}"
