"""The ``hyper-parallel`` command: a name per job."""

from __future__ import annotations

import sys

USAGE = "usage: hyper-parallel train [options]     (hyper-parallel train --help lists them)"


def main(argv: list[str] | None = None) -> int:
    """Run ``hyper-parallel JOB ...``; the exit code. A job's module is imported only when it is asked for."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["train"]:
        from hyper_parallel.trainer.command import main as train

        return train(arguments[1:])
    if arguments in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    given = f"unknown job {arguments[0]!r}; " if arguments else ""
    print(f"hyper-parallel: {given}{USAGE}", file=sys.stderr)
    return 2
