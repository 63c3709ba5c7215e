"""`python -m bench tp-overlap [row ...]`: products beside communication, one linear layer of Llama 8 B at a time.

For layers cut by columns (all-gather, then product) and by rows (product, then reduce-scatter), at several lengths: the
product alone, the plain program one after the other, and ours as it decides by itself and with each way forced. Sides take turns step by
step on all GPUs of the machine (or `--ranks`). `-forward` rows are the forward alone; the others are forward and backward
with the gradients of the input and the weight. *Hidden* is the part of the communication that the step does not become longer
by; with `--profile` the part that runs beside products is read from a trace, too (*beside*), which `--traces` keeps. Without
GPUs: two processes of tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.cases.tp_overlap_sides import OURS, PLAIN, SIDES, TORCH, Course, Found, Layer, hidden, measure
from bench.command import append_line, positive, rows_named
from bench.conditions import Conditions
from bench.machine import num_gpus
from bench.ranks import on_ranks

LENGTHS = (512, 2048, 4096, 8192)
HIDDEN, FEED_FORWARD, KEYS = 4096, 14336, 1024
# Name -> (whole features in, whole features out, whether they are cut by columns).
SHAPES = {
    "qkv": (HIDDEN, HIDDEN + 2 * KEYS, True),
    "gate": (HIDDEN, FEED_FORWARD, True),
    "gate-up": (HIDDEN, 2 * FEED_FORWARD, True),
    "o": (HIDDEN, HIDDEN, False),
    "down": (FEED_FORWARD, HIDDEN, False),
}
LAYERS = {
    layer.name: layer
    for length in LENGTHS
    for name, (features_in, features_out, by_columns) in SHAPES.items()
    for layer in (
        Layer(f"{name}-{length}", features_in, features_out, by_columns, length, forward_only=False),
        Layer(f"{name}-{length}-forward", features_in, features_out, by_columns, length, forward_only=True),
    )
}
GOAL = 1.02
"""Never slower than the plain program, but for what two measurements of one thing differ by."""


@dataclass(frozen=True)
class Row:
    """All sides of one layer: the slowest rank's times, rank 0's profiles."""

    layer: Layer
    num_ranks: int
    sides: dict[str, Found]
    rounds: int
    conditions: Conditions

    @property
    def ratio(self) -> float:
        """Ours, as it decides by itself, over the plain program."""
        return self.sides[OURS].milliseconds / self.sides[PLAIN].milliseconds

    @property
    def reached(self) -> bool:
        """Whether ours is not slower."""
        return self.ratio <= GOAL

    def to_json(self) -> str:
        """As one line of JSON, with nothing rounded."""
        values = {
            "case": f"tp-overlap {self.layer.name}",
            **asdict(self),
            "ratio": self.ratio,
            "reached": self.reached,
        }
        return json.dumps(values, sort_keys=True)

    def to_table_row(self) -> str:
        """For a Markdown table under HEADER."""
        sides = [self.sides.get(side) for side in (*SIDES, TORCH)]
        cells = (
            self.layer.name,
            str(self.num_ranks),
            *("-" if found is None else f"{found.milliseconds:.3f}" for found in sides),
            *(_percent(None if found is None else found.hidden) for found in sides[2:]),
            *(_percent(self.sides[side].beside) for side in (PLAIN, OURS)),
            f"{self.ratio:.3f}",
            "yes" if self.reached else "no",
            self.conditions.hardware,
            ", ".join(f"{name} {version}" for name, version in self.conditions.versions.items()),
            self.conditions.commit,
        )
        return f"| {' | '.join(cells)} |"


COLUMNS = (
    "row",
    "ranks",
    *(f"{side} ms" for side in (*SIDES, TORCH)),
    *(f"hidden {side}" for side in (*SIDES[2:], TORCH)),
    *(f"beside {side}" for side in (PLAIN, OURS)),
    "ours / plain",
    f"<= {GOAL}",
    "hardware",
    "versions",
    "commit",
)
HEADER = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


def main(arguments: Sequence[str]) -> int:
    """Run the rows; exit status 1 if ours is slower in one."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        layers = chosen(options.rows, options.ranks)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        for layer in layers:
            print(layer.name)
        return 0
    traces = None
    if options.traces is not None:
        options.traces.mkdir(parents=True, exist_ok=True)
        traces = str(options.traces.resolve())
    course = Course(options.rounds, options.warm, options.steps, options.profile, options.torch, traces)
    conditions, rows = Conditions.here(), []
    for layer in layers:
        of_ranks = on_ranks(options.ranks, measure, layer, course)
        row = Row(layer, options.ranks, _slowest(of_ranks), course.rounds, conditions)
        append_line(row.to_json(), options.json)
        rows.append(row)
    print("", HEADER, *(row.to_table_row() for row in rows), sep="\n")
    return 0 if all(row.reached for row in rows) else 1


def chosen(patterns: Sequence[str], num_ranks: int) -> list[Layer]:
    """The layers that one of the patterns names (none: all), tiny without GPUs. ValueError for what cannot be run."""
    found = rows_named(patterns, LAYERS)
    if num_ranks > num_gpus():
        found = [layer.tiny() for layer in found]
    for layer in found:
        if any(size % num_ranks for size in (layer.features_in, layer.features_out, layer.length)):
            raise ValueError(f"{layer} cannot be dealt to {num_ranks} ranks: give a divisor of its sizes")
    return found


def _slowest(ranks: Sequence[dict[str, Found]]) -> dict[str, Found]:
    """What takes all ranks ends with the last."""
    milliseconds = {side: max(rank[side].milliseconds for rank in ranks) for side in ranks[0]}
    return {
        side: Found(milliseconds[side], hidden(milliseconds, side), first.beside)
        for side, first in ranks[0].items()
    }


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.0%}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench tp-overlap", description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument(
        "rows", nargs="*", metavar="row", help="names or patterns of rows, as *-4096 (default: all)"
    )
    parser.add_argument("--list", action="store_true", help="name the rows, run nothing")
    parser.add_argument("--ranks", type=positive, default=num_gpus() or 2, help="processes, a GPU for each")
    parser.add_argument("--rounds", type=positive, default=Course.rounds, help="measurements of each side")
    parser.add_argument("--warm", type=positive, default=Course.warm, help="steps before time counts")
    parser.add_argument("--steps", type=positive, default=Course.timed, help="steps that are timed")
    parser.add_argument(
        "--profile", action="store_true", help="also how much of the communication runs under products"
    )
    parser.add_argument(
        "--torch", action="store_true", help="beside the forwards also torch's fused operators, on GPUs only"
    )
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="keep the traces of the profiles here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the JSON lines to this file too")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
