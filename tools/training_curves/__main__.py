"""The command: `python -m training_curves --out out/curves`; train what has not been trained, print the figures, and draw."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from training_curves.curves import best, first_below, table
from training_curves.drawing import drawing
from training_curves.runs import Job, run

PICTURE = Path(__file__).parents[2] / "docs" / "pages" / "optimizers-training.svg"


def main(arguments: Sequence[str]) -> int:
    """Train, print, draw."""
    parser = argparse.ArgumentParser(prog="training_curves", description="AdamW and Muon beside each other.")
    parser.add_argument(
        "--out", type=Path, default=Path("out/curves"), help="folder of the runs (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=300, help="of each run (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step (default: %(default)s)")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="the SVG (default: that of the guide)")
    given = parser.parse_args(arguments)
    curves = run(Job(given.out, given.steps, given.batch))
    print(table(curves))
    level = best(curves, "adamw").bits[-1]
    reached = first_below(best(curves, "muon"), level)
    where = "never" if reached is None else f"at step {reached}"
    print(
        f"Muon's best run has what AdamW's best run ends with ({level:.3f} bits per byte) {where} of {given.steps}"
    )
    given.picture.write_text(drawing(curves), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
