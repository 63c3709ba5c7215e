"""The command: `python -m op_table torch`, `python -m op_table mindspore` where that framework is, then `python -m op_table page`."""

import argparse
import os
import sys
from collections.abc import Sequence

from op_table import page, table


def main(arguments: Sequence[str]) -> int:
    """Measure what is kept of a framework, or make the page of what is kept."""
    parser = argparse.ArgumentParser(prog="op_table", description="The table of operations in the docs.")
    parser.add_argument(
        "what", choices=(*table.FRAMEWORKS, "page"), help="a framework to measure, or the page"
    )
    what = parser.parse_args(arguments).what
    if what == "page":
        page.write()
        return 0
    os.environ["HYPER_PARALLEL_PLATFORM"] = what
    table.write(table.measured(what))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
