"""`python -m bench tp [row ...]`: forward and backward of a tensor-parallel decoder, beside torch's and beside one by hand.

Ours, torch's parallelize_module and the limit (the same plain model cut by hand, collectives written out) take turns on all
GPUs of the machine (or `--ranks`), in `--rounds` rounds; they are built once and stay. Results and all gradients are compared
first: sides that compute something else make no row. The layer and the four-layer model have the sizes of Llama 8 B; `-sp`
cuts the sequence too, `-compiled` compiles every block. Rows of the loss: head and cross-entropy with the logits never held,
beside torch's, and beside ours with the logits held as the limit. Without GPUs: two processes of tiny sizes.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from bench.cases.tp_measured import Course, measure, slowest
from bench.cases.tp_row import HEADER, Row
from bench.cases.tp_settings import SETTINGS, Setting, on_host
from bench.command import append_line, positive, rows_named
from bench.conditions import Conditions
from bench.machine import num_gpus
from bench.ranks import on_ranks


def main(arguments: Sequence[str]) -> int:
    """Run the rows; exit status 1 if one misses a goal or fails."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        settings = chosen(options.rows, options.ranks)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        for setting in settings:
            print(setting.name)
        return 0
    if options.traces is not None:
        options.traces.mkdir(parents=True, exist_ok=True)
    course = Course(
        options.rounds,
        options.warm,
        options.steps,
        options.profile,
        None if options.traces is None else str(options.traces.resolve()),
    )
    conditions, rows, failed = Conditions.here(), [], False
    for _, group in groupby(settings, key=lambda setting: setting.family):
        try:
            found = run(list(group), options.ranks, course, conditions)
        except Exception:  # of one side of one family: the other families are to be measured all the same
            traceback.print_exc()
            failed = True
            continue
        for row in found:
            append_line(row.to_json(), options.json)
        rows += found
    print("", HEADER, *(row.to_table_row() for row in rows), sep="\n")
    return 0 if not failed and all(row.reached for row in rows) else 1


def chosen(patterns: Sequence[str], num_ranks: int) -> list[Setting]:
    """The settings that one of the patterns names (none: all), tiny without GPUs. ValueError for what cannot be run."""
    found = rows_named(patterns, SETTINGS)
    if num_ranks > num_gpus():
        found = [on_host(setting) for setting in found]
    heads = min(setting.family.sizes.groups for setting in found)
    if heads % num_ranks:
        raise ValueError(
            f"{heads} heads of keys and values cannot be dealt to {num_ranks} ranks: give a divisor"
        )
    return found


def run(settings: Sequence[Setting], num_ranks: int, course: Course, conditions: Conditions) -> list[Row]:
    """Measure settings of one family; the slowest rank and the largest peak count."""
    ranks = on_ranks(num_ranks, measure, settings, course)
    return [
        Row(setting, num_ranks, slowest(of_ranks), course.rounds, conditions)
        for setting, *of_ranks in zip(settings, *ranks, strict=True)
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench tp", description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument(
        "rows", nargs="*", metavar="row", help="names or patterns of rows, as layer-* (default: all)"
    )
    parser.add_argument("--list", action="store_true", help="name the rows, run nothing")
    parser.add_argument("--ranks", type=positive, default=num_gpus() or 2, help="processes, a GPU for each")
    parser.add_argument("--rounds", type=positive, default=Course.rounds, help="measurements of each side")
    parser.add_argument("--warm", type=positive, default=Course.warm, help="steps before time counts")
    parser.add_argument("--steps", type=positive, default=Course.timed, help="steps that are timed")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also where the time goes on the GPU, and what is exposed of it",
    )
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="keep the traces of the profiles here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the JSON lines to this file too")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
