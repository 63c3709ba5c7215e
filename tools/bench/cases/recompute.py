"""`python -m bench recompute [row ...]`: memory and time of layers that are computed again or swapped, beside torch's.

Forward and backward of eight layers of Llama 8 B, 8192 tokens, in bfloat16 on one GPU: all kept, recomputed in full and with products
kept beside torch.utils.checkpoint, swapped beside torch.autograd.graph.save_on_cpu (page-locked), and every second layer swapped and
recomputed; and under budgets of parts of what all layers save, with what they take of a budget at the peak. Outputs and all
gradients are compared first: sides that compute something else make no row. `copies that fit` is the part of what the layers save
whose copies take no longer than the forward; `swap-fitting` swaps that many layers. Without a GPU: tiny layers, which are not swapped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.cases.recompute_measured import Course, measure
from bench.cases.recompute_row import HEADER, Row
from bench.cases.recompute_settings import SETTINGS, Setting, sizes_for
from bench.command import append_line, positive, rows_named
from bench.conditions import Conditions
from bench.machine import num_gpus
from bench.models.sizes import Sizes
from bench.ranks import on_ranks


def main(arguments: Sequence[str]) -> int:
    """Run the rows; exit status 1 if one misses a goal."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        settings = rows_named(options.rows, SETTINGS)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        for setting in settings:
            print(setting.name)
        return 0
    sizes = sizes_for(num_gpus(), options.layers, options.length)
    course = Course(options.rounds, options.warm, options.steps)
    rows = run(settings, sizes, course, Conditions.here())
    for row in rows:
        append_line(row.to_json(), options.json)
    print("", HEADER, *(row.to_table_row() for row in rows), sep="\n")
    return 0 if all(row.reached for row in rows) else 1


def run(settings: Sequence[Setting], sizes: Sizes, course: Course, conditions: Conditions) -> list[Row]:
    """Compare, then measure the sides in turn; rows of those that could be measured."""
    (found,) = on_ranks(1, measure, settings, sizes, course)
    return [
        Row(setting, sizes, found, course.rounds, conditions)
        for setting in settings
        if all(side in found.sides for side in setting.sides)
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench recompute", description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument("rows", nargs="*", metavar="row", help="names or patterns of rows (default: all)")
    parser.add_argument("--list", action="store_true", help="name the rows, run nothing")
    parser.add_argument("--layers", type=positive, help="another number of layers")
    parser.add_argument("--length", type=positive, help="another number of tokens")
    parser.add_argument("--rounds", type=positive, default=Course.rounds, help="measurements of each side")
    parser.add_argument("--warm", type=positive, default=Course.warm, help="steps before time counts")
    parser.add_argument("--steps", type=positive, default=Course.timed, help="steps that are timed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the JSON lines to this file too")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
