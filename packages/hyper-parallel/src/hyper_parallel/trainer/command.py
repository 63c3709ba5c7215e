"""``hyper-parallel train``: check what was asked, start the processes, tell what went wrong in one line."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from hp_platform import get_platform, launch
from hp_platform.platform import ENVIRONMENT_VARIABLE
from hyper_parallel.trainer import checkpoint, results
from hyper_parallel.trainer.data import load_corpus
from hyper_parallel.trainer.errors import UsageError
from hyper_parallel.trainer.options import Options, options_of, parser
from hyper_parallel.trainer.sizes import check_fits
from hyper_parallel.trainer.verify import TOLERANCE, compare

if TYPE_CHECKING:
    from hyper_parallel.trainer.loop import Summary

EXIT_USAGE = 2
EXIT_FAILED = 1
CPU_PROCESSES = 4
MOST_PROCESSES = 4
PROCESSES_PER_CORE = 8
"""More would only take turns, and each needs some hundred MiB for the framework."""
SHOW_CURSOR = "\x1b[?25h"
SAYS_USAGE = f" failed with {UsageError.__name__}: "
"""In a worker's summary."""


def main(argv: list[str], prog: str = "hyper-parallel train") -> int:
    """Run the command; the exit code: 0, 2 for bad input, 1 for a run that failed or a comparison that did not hold."""
    debug = "--debug" in argv
    try:
        arguments = parser(prog).parse_args(argv)
        return _train(arguments)
    except UsageError as error:
        return _tell(prog, str(error), EXIT_USAGE, debug)
    except KeyboardInterrupt:
        return _tell(prog, "interrupted", EXIT_FAILED, debug)
    except Exception as error:
        _, says_usage, told = _first_line(error).partition(SAYS_USAGE)
        if says_usage and isinstance(error, launch.WorkerError):  # found only where the devices are
            return _tell(prog, told, EXIT_USAGE, debug)
        text = str(error) if debug else f"{_first_line(error)} (--debug shows the traceback)"
        return _tell(prog, text, EXIT_FAILED, debug)


def _train(arguments: argparse.Namespace) -> int:
    options = _resolve(arguments)
    if arguments.out is None and options.out != results.DEFAULT and _is_first():
        what = (
            "going on with the last run, in"
            if options.resume
            else f"{results.DEFAULT} holds another run: this one is in"
        )
        print(f"{what} {options.out}", flush=True)
    summary = _start(options)
    if not _is_first():
        return 0
    left = f"{results.PICTURE}, {results.METRICS}, {results.MODEL}, {results.CHECKPOINTS}/"
    print(f"results in {options.out}: {left}", flush=True)
    return _verify(options, summary) if arguments.verify else 0


def _resolve(arguments: argparse.Namespace) -> Options:
    """Everything that can be wrong is found here, before a process starts."""
    if arguments.platform:
        os.environ[ENVIRONMENT_VARIABLE] = arguments.platform
    try:
        platform = get_platform()
        handle = platform.device(arguments.device)
        environment = launch.environment()
    except (RuntimeError, ValueError, ImportError) as error:
        raise UsageError(_first_line(error)) from error
    if arguments.platform not in (None, platform.platform_type.value):
        raise UsageError(
            f"--platform {arguments.platform}: this process uses {platform.platform_type.value} already; start another"
        )
    if environment is not None:
        nproc = environment.world_size  # started by torchrun or msrun: their number counts
    elif arguments.nproc is not None:
        nproc = arguments.nproc
    else:
        nproc = CPU_PROCESSES if handle.name == "cpu" else min(handle.count(), MOST_PROCESSES)
    options = options_of(arguments, device=handle.name, nproc=nproc)
    most = handle.count() if handle.name != "cpu" else PROCESSES_PER_CORE * (os.cpu_count() or 1)
    if environment is None and nproc > most:
        raise UsageError(
            f"--nproc {nproc}: this machine has room for {most} processes on {handle.name}; give at most {most}"
        )
    needs = {"bfloat16": "bfloat16_compute", "float64": "reduce_float64"}.get(options.dtype)
    if needs and not platform.supports(needs, handle.name):
        raise UsageError(
            f"--dtype {options.dtype} does not work with {platform.platform_type.value} on {handle.name} (no {needs})"
        )
    if arguments.verify and options.resume:
        raise UsageError("--verify compares whole runs; leave out --resume")
    if arguments.overwrite and options.resume:
        raise UsageError("--overwrite removes what --resume would go on from: leave out one of them")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("matplotlib, which draws loss.png, is missing: pip install 'hyper-parallel[train]'")
    load_corpus(options.data, options.size.length)
    if handle.name == "cpu":
        processes = nproc if environment is None else environment.local_world_size or nproc
        check_fits(options, handle.memory_info()[1], processes=processes)
    _check_out(options, overwrite=arguments.overwrite)
    return options


def _check_out(options: Options, *, overwrite: bool) -> None:
    out = Path(options.out)
    if not options.resume and not overwrite and results.holds_run(out):
        raise UsageError(
            f"--out {out} holds another run: go on with it (--resume), give another --out, or remove it first (--overwrite)"
        )
    if options.resume:
        _check_resume(options, checkpoint.find(out / results.CHECKPOINTS, options.identity()))
    for folder in (out, out / results.CHECKPOINTS):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {folder}: cannot be made: {error.strerror}") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"--out {folder}: cannot be written to")
    if overwrite and _is_first():
        try:
            results.clear(out)
        except OSError as error:
            raise UsageError(f"--overwrite: {error.filename} cannot be removed: {error.strerror}") from None


def _check_resume(options: Options, saved: checkpoint.Saved) -> None:
    if saved.identity != options.identity():
        raise UsageError(
            f"--resume: {saved.folder} is of another model ({saved.identity}); give the same sizes, --dtype and --optimizer"
        )
    if saved.step >= options.steps:
        raise UsageError(
            f"--resume: {saved.folder} has {saved.step} steps already; ask for more with --steps"
        )


def _start(options: Options) -> Summary:
    # Importing this decides the framework (its classes inherit from the framework's), so it waits for --platform.
    from hyper_parallel.trainer.loop import run

    if launch.environment() is not None:
        return run(options)
    try:
        return launch.spawn(run, options.nproc, options.device, args=(options,))[0]
    except BaseException:
        if sys.stdout.isatty():
            print(
                SHOW_CURSOR, flush=True
            )  # rank 0 hid it for the bar, and was stopped before it showed it again
        raise


def _verify(options: Options, summary: Summary) -> int:
    from hyper_parallel.trainer.loop import run

    alone = dataclasses.replace(options, nproc=1, out=str(Path(options.out) / results.ONE_PROCESS))
    shutil.rmtree(alone.out, ignore_errors=True)
    Path(alone.out).mkdir(parents=True)
    print("verify: the same job in one process", flush=True)
    other = launch.spawn(run, 1, options.device, args=(alone,))[0]
    found = compare(
        summary.losses,
        other.losses,
        Path(options.out) / results.MODEL,
        Path(alone.out) / results.MODEL,
    )
    print(
        f"verify: largest difference of losses {found.loss:.3e}, of parameters {found.parameter:.3e} ({found.name})"
    )
    if options.dtype != "float64":
        print("verify: rounding makes runs differ in this dtype; --dtype float64 is the test", flush=True)
        return 0
    print(f"verify: {'equal' if found.within_tolerance() else 'NOT equal'} within {TOLERANCE:g}", flush=True)
    return 0 if found.within_tolerance() else EXIT_FAILED


def _is_first() -> bool:
    """Whether this process speaks: it is the only one, or rank 0 of those that torchrun or msrun started."""
    environment = launch.environment()
    return environment is None or environment.rank == 0


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _tell(prog: str, text: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"{prog}: {text}", file=sys.stderr, flush=True)
    return code
