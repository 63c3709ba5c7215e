"""`python -m bench optim [row ...]`: a step of Muon on sharded parameters, beside what its iterations alone would take.

The matrices of a decoder of 1 B parameters, sharded by fully_shard over all GPUs of the machine (or `--ranks`). Beside the step
of Muon: Newton-Schulz of its own matrices at the rate of the fastest batch of each shape, divided by ranks: by torch's products (the
limit, which kernels of our own do not move), and by ours; the step of torch.optim.Muon on whole parameters; and that of fused AdamW
on as many elements. All take turns in `--rounds` rounds, each built and freed; the changes that ours and torch's make are compared
first. Without GPUs: two processes of a tiny model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.cases.optim_measured import (
    Course,
    Measured,
    bytes_in_theory,
    compare,
    measure,
    over_rounds,
    profile,
    slowest,
)
from bench.cases.optim_row import HEADER, PROFILE_HEADER, Row
from bench.cases.optim_settings import SETTINGS, Setting, Side
from bench.command import append_line, positive, rows_named
from bench.conditions import Conditions
from bench.machine import num_gpus
from bench.models.sizes import SIZES
from bench.ranks import on_ranks


def main(arguments: Sequence[str]) -> int:
    """Run the rows; exit status 1 if one misses a goal."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        settings = chosen(options.rows, options.ranks, options.layers)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        for setting in settings:
            print(setting.name)
        return 0
    course, conditions, rows = Course(options.rounds, options.warm, options.steps), Conditions.here(), []
    for setting in settings:
        row = run(setting, options.ranks, course, conditions)
        rows.append(row)
        append_line(row.to_json(), options.json)
    print("", HEADER, *(row.to_table_row() for row in rows), sep="\n")
    if options.profile and options.ranks <= num_gpus():
        lines = [_profiled(setting, options.ranks, course, options.traces) for setting in settings]
        print("", PROFILE_HEADER, *lines, sep="\n")
    return 0 if all(row.reached for row in rows) else 1


def chosen(patterns: Sequence[str], num_ranks: int, layers: int | None = None) -> list[Setting]:
    """The settings that one of the patterns names (none: all that fit the ranks), tiny without GPUs.

    ValueError for a pattern that names nothing that fits.
    """
    found = [setting for setting in rows_named(patterns, SETTINGS) if setting.fits(num_ranks)]
    if not found:
        raise ValueError(
            f"{', '.join(patterns)} cannot be divided over {num_ranks} ranks: HSDP takes an even number of at least 4"
        )
    if num_ranks > num_gpus():
        found = [replace(each, model=f"tiny-for-{each.model}", sizes=SIZES["tiny"]) for each in found]
    if layers is not None:
        found = [
            replace(each, model=f"{each.model}-layers{layers}", sizes=replace(each.sizes, layers=layers))
            for each in found
        ]
    return found


def run(setting: Setting, num_ranks: int, course: Course, conditions: Conditions) -> Row:
    """Compare, then measure the sides in turn."""
    apart = max(on_ranks(num_ranks, compare, setting))
    found: dict[Side, list[Measured]] = {side: [] for side in Side}
    for _ in range(course.rounds):
        for side in Side:
            found[side].append(slowest(on_ranks(num_ranks, measure, side, setting, course)))
    sides = {side: over_rounds(rounds) for side, rounds in found.items()}
    theory = bytes_in_theory(setting, num_ranks)
    return Row(setting, num_ranks, sides, theory, apart, course.rounds, conditions)


def _profiled(setting: Setting, num_ranks: int, course: Course, traces: Path | None) -> str:
    """Of rank 0."""
    trace = None
    if traces is not None:
        traces.mkdir(parents=True, exist_ok=True)
        trace = traces.resolve() / f"optim-{setting.name}.json.gz"
    found = on_ranks(num_ranks, profile, setting, course, trace)[0]
    return f"| {' | '.join((setting.name, *found.cells()))} |"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench optim", description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument("rows", nargs="*", metavar="row", help="names or patterns of rows (default: all)")
    parser.add_argument("--list", action="store_true", help="name the rows that fit the machine, run nothing")
    parser.add_argument("--ranks", type=positive, default=num_gpus() or 2, help="processes, a GPU for each")
    parser.add_argument("--rounds", type=positive, default=Course.rounds, help="measurements of each side")
    parser.add_argument("--warm", type=positive, default=Course.warm, help="steps before time counts")
    parser.add_argument("--steps", type=positive, default=Course.timed, help="steps that are timed")
    parser.add_argument(
        "--profile", action="store_true", help="also where the time of our step goes on the GPU"
    )
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="keep the traces of the profiles here")
    parser.add_argument("--layers", type=positive, help="another number of layers of the model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the JSON lines to this file too")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
