"""Finds a C++17 compiler: $CXX, one on the PATH, or the one in the `ziglang` wheel."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass

_ON_PATH = ("g++", "c++", "clang++")


class NoCompilerError(RuntimeError):
    """There is no C++ compiler; the text says in one line what to install."""


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str


def find() -> Compiler:
    """The first compiler that answers.

    Raises:
        NoCompilerError: none was found, or $CXX does not run.
    """
    chosen = os.environ.get("CXX")
    if chosen:
        command = tuple(shlex.split(chosen))
        version = _version(command)
        if version is None:
            raise NoCompilerError(f"CXX={chosen} does not run; set CXX to a C++17 compiler or unset it")
        return Compiler(command, version)
    candidates = [(path,) for name in _ON_PATH if (path := shutil.which(name))]
    if importlib.util.find_spec("ziglang"):
        candidates.append((sys.executable, "-m", "ziglang", "c++"))
    for command in candidates:
        version = _version(command)
        if version is not None:
            return Compiler(command, version)
    raise NoCompilerError(
        "no C++ compiler found: install g++ or clang++, or `pip install ziglang`, or set CXX"
    )


def _version(command: tuple[str, ...]) -> str | None:
    try:
        answer = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.partition("\n")[0].strip()
