"""The rows of `optim`: our Muon, the limit, torch's Muon, and AdamW."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from bench.cases.optim_measured import Measured
from bench.cases.optim_settings import OF_LIMIT, Setting, Side
from bench.conditions import Conditions
from bench.profiles import COLUMNS as PROFILE_COLUMNS

MIB = 2**20
COLUMNS = (
    "row",
    "ranks",
    *(f"{side.value} ms" for side in Side),
    "x limit",
    "x own",
    "x torch",
    "x AdamW",
    "MiB sent",
    "in theory",
    "launches",
    "peak MiB",
    "torch's peak MiB",
    "goals",
    "reached",
    "apart",
    "hardware",
    "versions",
    "commit",
)
PROFILE_HEADER = f"| row | {' | '.join(PROFILE_COLUMNS)} |\n|{'---|' * (1 + len(PROFILE_COLUMNS))}"
HEADER = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


@dataclass(frozen=True)
class Row:
    """Medians over the rounds, and the conditions they were measured under."""

    setting: Setting
    num_ranks: int
    sides: Mapping[Side, Measured]
    theory_bytes: int
    """That a rank sends in a step at least, on average."""
    apart: float
    """The largest distance of a change from torch's, relative to its norm."""
    rounds: int
    conditions: Conditions

    def of(self, side: Side) -> float:
        """Our time as a multiple of a side's."""
        return self.sides[Side.OURS].milliseconds / self.sides[side].milliseconds

    @property
    def goals(self) -> dict[str, bool]:
        """Every goal, and whether it is reached."""
        ours, peer = self.sides[Side.OURS], self.sides[Side.PEER]
        known = ours.peak_bytes is not None and peer.peak_bytes is not None
        goals = {
            f"<= {OF_LIMIT:g} x limit": self.of(Side.LIMIT) <= OF_LIMIT,
            "sent <= 1.01 x theory": ours.sent_bytes <= 1.01 * self.theory_bytes,
        }
        if known:
            assert ours.peak_bytes is not None and peer.peak_bytes is not None
            goals["peak < torch's"] = ours.peak_bytes < peer.peak_bytes
        return goals

    @property
    def reached(self) -> bool:
        """All goals."""
        return all(self.goals.values())

    def to_json(self) -> str:
        """As one line of JSON, with nothing rounded."""
        values = {
            "case": f"optim {self.setting.name}",
            "setting": asdict(self.setting),
            "num_ranks": self.num_ranks,
            "rounds": self.rounds,
            "of_limit": self.of(Side.LIMIT),
            "of_iterations": self.of(Side.ITERATIONS),
            "of_peer": self.of(Side.PEER),
            "of_adamw": self.of(Side.ADAMW),
            "theory_bytes": self.theory_bytes,
            "goals": self.goals,
            "reached": self.reached,
            "apart": self.apart,
            "sides": {side.value: asdict(found) for side, found in self.sides.items()},
            "conditions": asdict(self.conditions),
        }
        return json.dumps(values, sort_keys=True)

    def to_table_row(self) -> str:
        """For a Markdown table under HEADER."""
        ours, peer = self.sides[Side.OURS], self.sides[Side.PEER]
        launches = ", ".join(f"{number} {kind}" for kind, number in sorted(ours.launches.items()))
        cells = (
            self.setting.name,
            str(self.num_ranks),
            *(f"{self.sides[side].milliseconds:.2f}" for side in Side),
            *(f"{self.of(side):.3f}" for side in Side if side is not Side.OURS),
            _mebibytes(ours.sent_bytes),
            _mebibytes(self.theory_bytes),
            launches or "-",
            _mebibytes(ours.peak_bytes),
            _mebibytes(peer.peak_bytes),
            ", ".join(self.goals),
            ", ".join("yes" if kept else "no" for kept in self.goals.values()),
            f"{self.apart:.1e}",
            self.conditions.hardware,
            ", ".join(f"{name} {version}" for name, version in self.conditions.versions.items()),
            self.conditions.commit,
        )
        return f"| {' | '.join(cells)} |"


def _mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / MIB:.1f}"
