"""The rows of `fsdp`: ours, FSDP2 and the limit of one setting."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from bench.cases.fsdp_measured import Measured, OnTheHost
from bench.cases.fsdp_segments import COLUMNS as SEGMENTS
from bench.cases.fsdp_segments import Segments
from bench.cases.fsdp_settings import OF_LIMIT, Setting
from bench.cases.fsdp_training import Side
from bench.conditions import Conditions
from bench.profiles import COLUMNS, Profile

GIB = 2**30


def _header(columns: Sequence[str]) -> str:
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


HEADER = _header(
    (
        "row",
        "ranks",
        "ours s",
        "FSDP2 s",
        "x FSDP2",
        "limit s",
        "of the limit",
        "tokens/s/rank",
        "peak GiB ours",
        "peak GiB FSDP2",
        "goals",
        "reached",
        "losses apart",
        "hardware",
        "versions",
        "commit",
    )
)
PROFILE_HEADER = _header(("row", "ms of a step", *COLUMNS, "host", "host's processor"))
SEGMENTS_HEADER = _header(("row", "ms of", *SEGMENTS))
FUNCTIONS_HEADER = _header(("side", "us of a step", "with callees", "calls", "function"))


@dataclass(frozen=True)
class Row:
    """Medians over the rounds, and the conditions they were measured under."""

    setting: Setting
    num_ranks: int
    sides: Mapping[Side, Measured]
    rounds: int
    losses_apart: float
    """The largest relative difference of the losses of ours and the peer."""
    conditions: Conditions

    @property
    def of_peer(self) -> float:
        """How many times as fast as the peer."""
        return self.sides[Side.PEER].milliseconds / self.sides[Side.OURS].milliseconds

    @property
    def of_limit(self) -> float:
        """The part of the limit's speed."""
        return self.sides[Side.LIMIT].milliseconds / self.sides[Side.OURS].milliseconds

    @property
    def reached(self) -> bool:
        """Whether the goals of speed are reached, and the peak is no higher than the peer's (where it is known)."""
        ours, peer = self.sides[Side.OURS].peak_bytes, self.sides[Side.PEER].peak_bytes
        no_more = ours is None or peer is None or ours <= peer
        return self.of_peer >= self.setting.goal_of_peer and self.of_limit >= OF_LIMIT and no_more

    def to_json(self) -> str:
        """As one line of JSON, with nothing rounded."""
        values = {
            "case": f"fsdp {self.setting.name}",
            "setting": asdict(self.setting),
            "num_ranks": self.num_ranks,
            "rounds": self.rounds,
            "of_peer": self.of_peer,
            "of_limit": self.of_limit,
            "reached": self.reached,
            "losses_apart": self.losses_apart,
            "sides": {side.value: asdict(found) for side, found in self.sides.items()},
            "conditions": asdict(self.conditions),
        }
        return json.dumps(values, sort_keys=True)

    def to_table_row(self) -> str:
        """For a Markdown table under HEADER."""
        ours, peer, limit = (self.sides[side] for side in (Side.OURS, Side.PEER, Side.LIMIT))
        cells = (
            self.setting.name,
            str(self.num_ranks),
            _seconds(ours),
            _seconds(peer),
            f"{self.of_peer:.3f}",
            _seconds(limit),
            f"{self.of_limit:.3f}",
            f"{self.setting.tokens / ours.milliseconds * 1e3:,.0f}",
            _gibibytes(ours.peak_bytes),
            _gibibytes(peer.peak_bytes),
            f">= {self.setting.goal_of_peer:g} x FSDP2, >= {OF_LIMIT:g} of the limit, peak <= FSDP2's",
            "yes" if self.reached else "no",
            f"{self.losses_apart:.1e}",
            self.conditions.hardware,
            ", ".join(f"{name} {version}" for name, version in self.conditions.versions.items()),
            self.conditions.commit,
        )
        return f"| {' | '.join(cells)} |"


@dataclass(frozen=True)
class ProfileRow:
    """Where the time of one side goes."""

    setting: Setting
    side: Side
    profile: Profile | None
    """None without a GPU."""
    host: OnTheHost

    def to_json(self) -> str:
        """As one line of JSON, with nothing rounded."""
        found = None
        if self.profile is not None:
            busy = {kind.value: value for kind, value in self.profile.busy.items()}
            found = {**asdict(self.profile), "busy": busy}
        values = {
            "profile": f"fsdp {self.setting.name}",
            "side": self.side.value,
            "gpu": found,
            "host": asdict(self.host),
        }
        return json.dumps(values, sort_keys=True)

    def to_table_row(self) -> str:
        """For a Markdown table under PROFILE_HEADER."""
        on_gpu = ("-",) * len(COLUMNS) if self.profile is None else self.profile.cells()
        on_host = (f"{self.host.wall:.1f}", f"{self.host.processor:.1f}")
        return f"| {' | '.join((self.setting.name, self.side.value, *on_gpu, *on_host))} |"


@dataclass(frozen=True)
class SegmentsRow:
    """How long the parts of a step take on one side."""

    setting: Setting
    side: Side
    segments: Segments

    def to_json(self) -> str:
        """As one line of JSON, with nothing rounded."""
        values = {
            "segments": f"fsdp {self.setting.name}",
            "side": self.side.value,
            "milliseconds": asdict(self.segments),
        }
        return json.dumps(values, sort_keys=True)

    def to_table_row(self) -> str:
        """For a Markdown table under SEGMENTS_HEADER."""
        cells = (self.setting.name, self.side.value, *(f"{value:.2f}" for value in self.segments.values()))
        return f"| {' | '.join(cells)} |"


def _seconds(found: Measured) -> str:
    return f"{found.milliseconds / 1e3:.4f}"


def _gibibytes(count: int | None) -> str:
    return "not known" if count is None else f"{count / GIB:.2f}"
