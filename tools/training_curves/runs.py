"""The jobs: `hyper-parallel train` with each optimizer at several rates, everything else equal."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from training_curves.curves import OUTPUT, Curve, read

RATES = {"adamw": ("3e-3", "6e-3", "1e-2"), "muon": ("6e-3", "1e-2", "2e-2")}
"""Peak learning rates; the best of each optimizer counts, so that none loses by a rate that suits the other."""


@dataclass(frozen=True)
class Job:
    """What all runs have in common."""

    out: Path
    steps: int
    batch: int


def run(job: Job) -> list[Curve]:
    """Train what has not been trained yet, one run after the other; return all curves."""
    found = []
    for optimizer, rates in RATES.items():
        for rate in rates:
            folder = job.out / f"{optimizer}-{rate}"
            if not (folder / OUTPUT).exists():
                _train(job, optimizer, rate, folder)
            found.append(read(folder, optimizer, rate))
    return found


def _train(job: Job, optimizer: str, rate: str, folder: Path) -> None:
    options = {
        "--device": "cpu",
        "--nproc": "1",
        "--steps": str(job.steps),
        "--batch": str(job.batch),
        "--optimizer": optimizer,
        "--lr": rate,
        "--save-every": str(job.steps),
        "--out": str(folder),
    }
    words = [word for pair in options.items() for word in pair]
    command = [sys.executable, "-m", "hyper_parallel", "train", "--overwrite", *words]
    print(" ".join(command[1:]), flush=True)
    environment = {**os.environ, "HYPER_PARALLEL_PLATFORM": "torch"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    (folder / OUTPUT).write_text(done.stdout)
