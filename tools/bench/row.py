"""The row of a case: the only form in which a number of ours is quoted."""

import json
from dataclasses import asdict, dataclass

from bench.case import Case, Sample
from bench.conditions import Conditions

MIB = 2**20
HEADER = (
    "| case | ours | peer | unit | ratio | goal | reached | memory ours | memory peer | hardware | versions | commit |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Row:
    """Medians of both sides, their ratio, and the conditions they were measured under."""

    case: str
    ours: float
    peer: float
    peer_name: str
    unit: str
    ratio: float
    goal: str
    reached: bool
    ours_peak_bytes: int | None
    peer_peak_bytes: int | None
    rounds: int
    conditions: Conditions

    @classmethod
    def of(cls, case: Case, ours: Sample, peer: Sample, rounds: int, conditions: Conditions) -> "Row":
        """The row of the medians of a case."""
        if peer.value <= 0:
            raise ValueError(
                f"{case.name}: the peer measured {peer.value} {case.unit}; a ratio needs more than zero"
            )
        ratio = ours.value / peer.value
        return cls(
            case=case.name,
            ours=ours.value,
            peer=peer.value,
            peer_name=case.peer_name,
            unit=case.unit,
            ratio=ratio,
            goal=case.describe_goal(),
            reached=case.reaches_goal(ratio),
            ours_peak_bytes=ours.peak_bytes,
            peer_peak_bytes=peer.peak_bytes,
            rounds=rounds,
            conditions=conditions,
        )

    def to_json(self) -> str:
        """The row as one line of JSON, with nothing rounded."""
        return json.dumps(asdict(self), sort_keys=True)

    def to_table_row(self) -> str:
        """The row for a Markdown table under HEADER."""
        cells = (
            self.case,
            f"{self.ours:.4g}",
            f"{self.peer:.4g} ({self.peer_name})",
            self.unit,
            f"{self.ratio:.3f}",
            self.goal,
            "yes" if self.reached else "no",
            _mebibytes(self.ours_peak_bytes),
            _mebibytes(self.peer_peak_bytes),
            self.conditions.hardware,
            ", ".join(f"{name} {version}" for name, version in self.conditions.versions.items()),
            self.conditions.commit,
        )
        return f"| {' | '.join(cells)} |"


def _mebibytes(count: int | None) -> str:
    return "not known" if count is None else f"{count / MIB:.1f} MiB"
