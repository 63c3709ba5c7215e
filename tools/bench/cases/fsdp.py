"""`python -m bench fsdp [row ...]`: a training step of a sharded decoder, beside FSDP2 and beside the limit of one GPU.

Ours, FSDP2 and the limit take turns on all GPUs of the machine (or `--ranks`), each built and freed, in `--rounds` rounds.
The losses of the warm steps are compared first: sides that compute something else make no row. Without GPUs: two processes
of a tiny model, where times mean little.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from statistics import median

from bench.cases.fsdp_measured import (
    Measured,
    Steps,
    functions,
    measure,
    measure_host,
    measure_segments,
    profile,
)
from bench.cases.fsdp_row import (
    FUNCTIONS_HEADER,
    HEADER,
    PROFILE_HEADER,
    SEGMENTS_HEADER,
    ProfileRow,
    Row,
    SegmentsRow,
)
from bench.cases.fsdp_settings import SETTINGS, Setting
from bench.cases.fsdp_training import Side
from bench.command import append_line, positive, rows_named
from bench.conditions import Conditions
from bench.machine import num_gpus
from bench.models.sizes import SIZES, Sizes
from bench.ranks import on_ranks

# Of the losses, relative: bfloat16 rounds sums that are taken in another order, and steps carry that on.
TOLERANCE = 2e-3


def main(arguments: Sequence[str]) -> int:
    """Run the rows; exit status 1 if one misses a goal."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        settings = chosen(options.rows, options.ranks, _overrides(options))
        settings = [replace(setting, own_adamw=options.own_adamw) for setting in settings]
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        for setting in settings:
            print(setting.name)
        return 0
    steps, conditions = Steps(options.warm, options.steps), Conditions.here()
    rows, profiles, parts = [], [], []
    for setting in settings:
        row = run(setting, options.ranks, steps, options.rounds, conditions)
        rows.append(row)
        append_line(row.to_json(), options.json)
        for side in Side if options.profile else ():
            found = _profiled(side, setting, options.ranks, steps, options.traces)
            profiles.append(found)
            append_line(found.to_json(), options.json)
        for side in Side if options.segments else ():
            part = SegmentsRow(
                setting, side, on_ranks(options.ranks, measure_segments, side, setting, steps)[0]
            )
            parts.append(part)
            append_line(part.to_json(), options.json)
    print("", HEADER, *(row.to_table_row() for row in rows), sep="\n")
    if profiles:
        print("", PROFILE_HEADER, *(row.to_table_row() for row in profiles), sep="\n")
    if parts:
        print("", SEGMENTS_HEADER, *(part.to_table_row() for part in parts), sep="\n")
    if options.functions:
        lines = (_functions(setting, options.ranks, steps, options.functions) for setting in settings)
        print("", FUNCTIONS_HEADER, *chain.from_iterable(lines), sep="\n")
    return 0 if all(row.reached for row in rows) else 1


def _functions(setting: Setting, num_ranks: int, steps: Steps, count: int) -> list[str]:
    """Of rank 0."""
    sides = (Side.OURS, Side.PEER)
    return [line for side in sides for line in on_ranks(num_ranks, functions, side, setting, steps, count)[0]]


def chosen(patterns: Sequence[str], num_ranks: int, overrides: dict[str, int]) -> list[Setting]:
    """The settings that one of the patterns names (none: all that fit the ranks), with other sizes if there are any.

    Without GPUs the sizes are tiny ones. ValueError for a pattern that names nothing that fits.
    """
    found = [setting for setting in rows_named(patterns, SETTINGS) if setting.fits(num_ranks)]
    if not found:
        raise ValueError(
            f"{', '.join(patterns)} cannot be divided over {num_ranks} ranks: HSDP takes an even number of at least 4"
        )
    on_host = num_ranks > num_gpus()
    return [_resized(setting, overrides, on_host=on_host) for setting in found]


def _resized(setting: Setting, overrides: dict[str, int], *, on_host: bool) -> Setting:
    if on_host:
        setting = replace(setting, model=f"tiny-for-{setting.model}", sizes=SIZES["tiny"])
    if overrides:
        label = "-".join(f"{name}{value}" for name, value in overrides.items())
        setting = replace(
            setting, model=f"{setting.model}-{label}", sizes=replace(setting.sizes, **overrides)
        )
    return setting


def run(setting: Setting, num_ranks: int, steps: Steps, rounds: int, conditions: Conditions) -> Row:
    """Measure the three in turn; the losses of ours and the peer are compared in every round."""
    found: dict[Side, list[Measured]] = {side: [] for side in Side}
    apart = 0.0
    for _ in range(rounds):
        losses = {}
        for side in Side:
            ranks = on_ranks(num_ranks, measure, side, setting, steps)
            found[side].append(slowest(ranks))
            losses[side] = [rank.losses for rank in ranks]
            if side is Side.PEER:
                apart = max(apart, compare(losses[Side.OURS], losses[Side.PEER]))
    sides = {side: _median(of_side) for side, of_side in found.items()}
    return Row(setting, num_ranks, sides, rounds, apart, conditions)


def compare(ours: Sequence[Sequence[float]], peer: Sequence[Sequence[float]]) -> float:
    """The largest relative difference between losses, by rank and step. RuntimeError if it is more than rounding."""
    pairs = [pair for of_rank in zip(ours, peer, strict=True) for pair in zip(*of_rank, strict=True)]
    if not all(abs(a - b) <= TOLERANCE * abs(b) for a, b in pairs):  # not for nan either
        raise RuntimeError(
            f"the two sides do not compute the same: losses by rank and step are {ours} and {peer}; at most "
            f"{TOLERANCE:.0e} apart is rounding"
        )
    return max(abs(a - b) / abs(b) for a, b in pairs)


def slowest(ranks: Sequence[Measured]) -> Measured:
    """A step ends when the last rank has done it, and memory must do for the rank that takes most; losses of rank 0."""
    peaks = [rank.peak_bytes for rank in ranks if rank.peak_bytes is not None]
    return Measured(max(rank.milliseconds for rank in ranks), max(peaks, default=None), ranks[0].losses)


def _median(rounds: Sequence[Measured]) -> Measured:
    peaks = [each.peak_bytes for each in rounds if each.peak_bytes is not None]
    return Measured(median(each.milliseconds for each in rounds), max(peaks, default=None), rounds[0].losses)


def _profiled(side: Side, setting: Setting, num_ranks: int, steps: Steps, traces: Path | None) -> ProfileRow:
    """Of rank 0."""
    host = on_ranks(num_ranks, measure_host, side, setting, steps)[0]
    if num_ranks > num_gpus():
        return ProfileRow(setting, side, None, host)
    trace = None
    if traces is not None:
        traces.mkdir(parents=True, exist_ok=True)
        trace = traces.resolve() / f"fsdp-{setting.name}-{side.value}.json.gz"
    return ProfileRow(setting, side, on_ranks(num_ranks, profile, side, setting, steps, trace)[0], host)


def _overrides(options: argparse.Namespace) -> dict[str, int]:
    given = {field.name: getattr(options, field.name) for field in fields(Sizes)}
    return {name: value for name, value in given.items() if value is not None}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench fsdp", description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument(
        "rows", nargs="*", metavar="row", help="names or patterns of rows, as 1b-* (default: all)"
    )
    parser.add_argument("--list", action="store_true", help="name the rows that fit the machine, run nothing")
    parser.add_argument("--ranks", type=positive, default=num_gpus() or 2, help="processes, a GPU for each")
    parser.add_argument("--rounds", type=positive, default=3, help="measurements of each side")
    parser.add_argument("--warm", type=positive, default=Steps.warm, help="steps before time counts")
    parser.add_argument("--steps", type=positive, default=Steps.timed, help="steps that are timed")
    parser.add_argument(
        "--profile", action="store_true", help="also where the time goes, on the GPU and the host"
    )
    parser.add_argument(
        "--segments", action="store_true", help="also how long the parts of a step take, without a profiler"
    )
    parser.add_argument(
        "--functions", type=positive, metavar="N", help="also the N functions that cost the host most"
    )
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="keep the traces of the profiles here")
    parser.add_argument("--own-adamw", action="store_true", help="our side has hp-optim's AdamW, not torch's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the JSON lines to this file too")
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name}", type=positive, help=f"another {field.name} of the model")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
