"""Compiling the emulated CANN."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from npu_emulator import _compiler, _libraries, build


def run_build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"NPU_EMULATOR_BUILD": str(folder)} | environment
    command = [sys.executable, "-m", "npu_emulator.build"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)


def test_a_fresh_build_compiles_without_warnings_and_the_next_one_does_nothing(tmp_path: Path) -> None:
    first = run_build(tmp_path)
    assert first.returncode == 0, first.stderr
    assert "compiled in" in first.stdout
    assert first.stderr == ""
    expected = {*_libraries.COMPILED, *_libraries.PLACEHOLDERS, "stamp.json"}
    assert {path.name for path in tmp_path.iterdir()} == expected
    second = run_build(tmp_path)
    assert second.returncode == 0
    assert "up to date" in second.stdout


def test_changed_sources_are_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(_libraries.folder(), tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("NPU_EMULATOR_BUILD", str(tmp_path))
    compiled: list[Path] = []

    def pretend(command: tuple[str, ...], into: Path) -> None:
        compiled.append(into)
        for name in (*_libraries.COMPILED, *_libraries.PLACEHOLDERS):
            (into / name).touch()

    monkeypatch.setattr(build, "_compile", pretend)
    monkeypatch.setattr(_libraries, "sources_digest", lambda: "changed")
    assert build.build()
    assert len(compiled) == 1
    assert not build.build()


def test_without_a_compiler_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NPU_EMULATOR_BUILD", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(_compiler.shutil, "which", lambda name: None)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ziglang" else find_spec(name)
    )
    assert build.main() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "install g++ or clang++, or `pip install ziglang`, or set CXX" in printed.err


def test_a_compiler_that_does_not_run_is_named(tmp_path: Path) -> None:
    result = run_build(tmp_path, CXX="/nowhere/c++")
    assert result.returncode == 2
    assert (
        result.stderr
        == "npu_emulator: CXX=/nowhere/c++ does not run; set CXX to a C++17 compiler or unset it\n"
    )


def test_without_torch_npu_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_libraries, "torch_npu_version", lambda: None)
    assert build.main() == 2
    assert "torch_npu is not installed here" in capsys.readouterr().err


def test_the_zig_wheel_is_the_last_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(_compiler.shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(_compiler, "_version", lambda command: "zig")
    assert _compiler.find().command == (sys.executable, "-m", "ziglang", "c++")
