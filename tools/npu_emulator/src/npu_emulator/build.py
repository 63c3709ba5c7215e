"""`python -m npu_emulator.build`: compile the emulated CANN.

The ACL and HCCL headers are those of the installed torch_npu wheel, so the compiler checks every signature against
the version under test. Nothing is compiled when the sources, torch_npu and the compiler are those of the last build.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from npu_emulator import _compiler, _libraries

_FLAGS = ("-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra")


class BuildError(RuntimeError):
    """The build cannot start; the text says in one line why."""


def build() -> bool:
    """Compile what is out of date. Returns whether anything was compiled.

    Raises:
        BuildError: torch_npu is not installed.
        NoCompilerError: there is no C++ compiler.
        CalledProcessError: the compiler refused the sources; it has printed why.
    """
    version = _libraries.torch_npu_version()
    if version is None:
        raise BuildError("torch_npu is not installed here: its wheel has the headers to compile against")
    compiler = _compiler.find()
    stamp = _libraries.Stamp(
        _libraries.sources_digest(), version, f"{' '.join(compiler.command)}: {compiler.version}"
    )
    if stamp == _libraries.read_stamp():
        return False
    target = _libraries.folder()
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix="build-") as name:
        scratch = Path(name)
        _compile(compiler.command, scratch)
        # Renamed into place: a process that has the old file mapped keeps it, and nobody sees half a library.
        for library in (*_libraries.COMPILED, *_libraries.PLACEHOLDERS):
            os.replace(scratch / library, target / library)
    _libraries.write_stamp(stamp)
    return True


def _include_flags() -> list[str]:
    spec = importlib.util.find_spec("torch_npu")  # finds the package without importing it
    assert spec is not None and spec.origin is not None
    include = Path(spec.origin).parent / "include"
    return ["-isystem", str(include), "-isystem", str(include / "third_party" / "acl" / "inc")]


def _compile(command: tuple[str, ...], into: Path) -> None:
    def start(library: str, *arguments: str) -> subprocess.Popen:
        exports = f"-Wl,--version-script={_libraries.SOURCES / 'exports.map'}"
        output = ["-o", str(into / library), f"-Wl,-soname,{library}", exports]
        return subprocess.Popen([*command, *_FLAGS, *arguments, *output])

    def finish(running: list[subprocess.Popen]) -> None:
        codes = [(process.wait(), process.args) for process in running]
        for code, arguments in codes:
            if code:
                raise subprocess.CalledProcessError(code, arguments)

    includes = _include_flags()
    finish(
        [
            start(
                library,
                *includes,
                *(str(path) for path in _libraries.source_files(part) if path.suffix == ".cpp"),
            )
            for library, part in _libraries.COMPILED.items()
        ]
    )
    # torch_npu looks symbols up in these by handle, which finds those of the libraries that they depend on.
    placeholder = str(_libraries.SOURCES / "placeholder.cpp")
    finish(
        [
            start(library, placeholder, "-Wl,--no-as-needed", str(into / provider))
            for library, provider in _libraries.PLACEHOLDERS.items()
        ]
    )


def main() -> int:
    """The command. Returns 0, 1 if the compiler fails, 2 if there is nothing to compile with or against."""
    began = time.monotonic()
    try:
        compiled = build()
    except (BuildError, _compiler.NoCompilerError) as error:
        print(f"npu_emulator: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"npu_emulator: the compiler failed with status {error.returncode}", file=sys.stderr)
        return 1
    took = f"compiled in {time.monotonic() - began:.1f} s" if compiled else "up to date"
    print(f"npu_emulator: {_libraries.folder()} is {took}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
