"""The conditions that a row belongs to: hardware, versions, commit."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

DISTRIBUTIONS = (
    "torch",
    "torch-npu",
    "mindspore",
    "hp-platform",
    "hp-dtensor",
    "hp-fsdp",
    "hp-tp",
    "hp-optim",
    "hp-recompute",
)
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Conditions:
    """Where and with what a row was measured."""

    hardware: str
    versions: dict[str, str]
    commit: str

    @classmethod
    def here(cls) -> "Conditions":
        """The conditions of this process."""
        return cls(hardware=_hardware(), versions=_versions(), commit=_commit())


def _hardware() -> str:
    cpu = f"{len(os.sched_getaffinity(0))} cores of {_cpu_model()}"
    accelerators = _query("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    if not accelerators:
        return cpu
    names = accelerators.splitlines()
    return f"{len(names)} x {names[0]}, {cpu}"


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _commit() -> str:
    commit = _query("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    # A number from a tree that nobody can check out is marked as such.
    changed = _query("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changed else commit


def _query(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
