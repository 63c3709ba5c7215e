"""The rows of `tp`: ours, torch's and the limit of one setting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from bench.cases.tp_measured import Compared, Measured
from bench.cases.tp_settings import Part, Setting, Side
from bench.conditions import Conditions

MIB = 2**20
COLUMNS = (
    "row",
    "ranks",
    *(f"{side.value} ms" for side in Side),
    "x torch",
    "of the limit",
    *(f"peak MiB {side.value}" for side in Side),
    *(f"exposed ms {side.value}" for side in Side),
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
    num_ranks: int
    found: Compared
    rounds: int
    conditions: Conditions

    @property
    def sides(self) -> Mapping[Side, Measured]:
        """What was measured."""
        return self.found.sides

    @property
    def of_peer(self) -> float:
        """How many times as fast as the peer."""
        return self.sides[Side.PEER].milliseconds / self.sides[Side.OURS].milliseconds

    @property
    def of_limit(self) -> float:
        """The part of the limit's speed."""
        return self.sides[Side.LIMIT].milliseconds / self.sides[Side.OURS].milliseconds

    @property
    def goals(self) -> dict[str, bool | None]:
        """Every goal of the row, and whether it is reached; None where that was not measured."""
        ours, peer, limit = (self.sides[side] for side in Side)
        if self.setting.family.part is Part.LOSS:
            return {
                "peak < with logits held": _kept(ours.peak_bytes, limit.peak_bytes, strictly=True),
                "peak < torch's": _kept(ours.peak_bytes, peer.peak_bytes, strictly=True),
            }
        goal = self.setting.goal_of_peer or 0.0
        return {
            f">= {goal:g} x torch": self.of_peer >= goal,
            "peak <= torch's": _kept(ours.peak_bytes, peer.peak_bytes),
            "exposed <= torch's": _kept(_exposed(ours), _exposed(peer)),
        }

    @property
    def reached(self) -> bool:
        """No goal that was measured is missed."""
        return all(kept is not False for kept in self.goals.values())

    def to_json(self) -> str:
        """As one line of JSON, with nothing rounded."""
        family = self.setting.family
        values = {
            "case": f"tp {self.setting.name}",
            "part": family.part.value,
            "sizes": asdict(family.sizes),
            "length": self.setting.length,
            "sequence_parallel": family.sequence_parallel,
            "compiled": family.compiled,
            "num_ranks": self.num_ranks,
            "rounds": self.rounds,
            "of_peer": self.of_peer,
            "of_limit": self.of_limit,
            "goals": self.goals,
            "reached": self.reached,
            "apart": self.found.apart,
            "sides": {side.value: _as_values(found) for side, found in self.sides.items()},
            "conditions": asdict(self.conditions),
        }
        return json.dumps(values, sort_keys=True)

    def to_table_row(self) -> str:
        """For a Markdown table under HEADER."""
        words = {True: "yes", False: "no", None: "not measured"}
        sides = [self.sides[side] for side in Side]
        cells = (
            self.setting.name,
            str(self.num_ranks),
            *(f"{found.milliseconds:.3f}" for found in sides),
            f"{self.of_peer:.3f}",
            f"{self.of_limit:.3f}",
            *(_cell(found.peak_bytes, MIB) for found in sides),
            *(_cell(_exposed(found), 1, "{:.2f}") for found in sides),
            ", ".join(self.goals),
            ", ".join(words[kept] for kept in self.goals.values()),
            f"{self.found.apart:.1e}",
            self.conditions.hardware,
            ", ".join(f"{name} {version}" for name, version in self.conditions.versions.items()),
            self.conditions.commit,
        )
        return f"| {' | '.join(cells)} |"


def _exposed(found: Measured) -> float | None:
    return None if found.profile is None else found.profile.exposed


def _kept(ours: float | None, bound: float | None, *, strictly: bool = False) -> bool | None:
    if ours is None or bound is None:
        return None
    return ours < bound or (ours == bound and not strictly)


def _as_values(found: Measured) -> dict[str, object]:
    values = asdict(found)
    if found.profile is not None:
        values["profile"]["busy"] = {kind.value: value for kind, value in found.profile.busy.items()}
    return values


def _cell(value: float | None, unit: float, form: str = "{:.1f}") -> str:
    return "-" if value is None else form.format(value / unit)
