"""The command: `python -m bench [--list] [--rounds N] [--json FILE] [case ...]`, or `python -m bench fsdp|tp|tp-overlap|optim|recompute ...`."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import runner
from bench.case import Case
from bench.cases import CASES, fsdp, optim, recompute, tp, tp_overlap
from bench.conditions import Conditions
from bench.row import HEADER


def main(arguments: Sequence[str], cases: Mapping[str, Case] = CASES) -> int:
    """Run the named cases, or all; exit status 1 if one misses its goal, 2 for a wrong call."""
    # Rows of their own: the limit and a profile stand beside the two.
    if arguments[:1] == ["fsdp"]:
        return fsdp.main(arguments[1:])
    if arguments[:1] == ["tp"]:
        return tp.main(arguments[1:])
    if arguments[:1] == ["tp-overlap"]:
        return tp_overlap.main(arguments[1:])
    if arguments[:1] == ["optim"]:
        return optim.main(arguments[1:])
    if arguments[:1] == ["recompute"]:
        return recompute.main(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="bench",
        description="Ours and the peer in turn, on this machine.",
        epilog=(
            "`bench fsdp --help`: training steps beside FSDP2 and the limit of one GPU, with profiles; `bench tp --help`: "
            "forward and backward of tensor parallel layers beside torch's and ones by hand; `bench tp-overlap --help`: one "
            "product beside its communication; `bench optim --help`: a step of Muon on sharded parameters; "
            "`bench recompute --help`: memory and time of layers that are recomputed or swapped."
        ),
    )
    parser.add_argument("names", nargs="*", metavar="case", help="the cases to run (default: all)")
    parser.add_argument("--list", action="store_true", help="name the cases and their goals, run nothing")
    parser.add_argument("--rounds", type=int, default=runner.ROUNDS, help="measurements of each side")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the JSON lines to this file too")
    options = parser.parse_args(arguments)

    if unknown := sorted(set(options.names) - set(cases)):
        parser.error(f"no case is named {', '.join(unknown)}; the cases are: {', '.join(cases)}")
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; at least one is needed")
    chosen = [cases[name] for name in options.names or cases]
    if options.list:
        for case in chosen:
            print(f"{case.name:24} {case.describe_goal():8} of {case.peer_name}: {case.summary}")
        return 0

    conditions = Conditions.here()
    rows = []
    for case in chosen:
        row = runner.run(case, conditions, options.rounds)
        rows.append(row)
        print(row.to_json(), flush=True)
        if options.json is not None:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(row.to_json() + "\n")
    print("", HEADER, *(row.to_table_row() for row in rows), sep="\n")
    return 0 if all(row.reached for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
