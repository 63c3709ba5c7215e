"""The emulation acts only where NPU_EMULATOR=1 says so, and says in one line what is wrong."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from npu_emulator import _libraries


def run(program: str, *, emulator: str | None, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("NPU_EMULATOR")}
    for name in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "TASK_QUEUE_ENABLE"):
        env.pop(name, None)
    if "NPU_EMULATOR_BUILD" in os.environ:
        env["NPU_EMULATOR_BUILD"] = os.environ["NPU_EMULATOR_BUILD"]
    if emulator is not None:
        env["NPU_EMULATOR"] = emulator
    env |= environment
    return subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=180
    )


STATE = """
import os, sys
print([m for m in sys.modules if "npu_emulator" in m], [f for f in sys.meta_path if "npu_emulator" in type(f).__module__],
      os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD"), os.environ.get("TASK_QUEUE_ENABLE"), "torch" in sys.modules)
"""


@pytest.mark.parametrize("emulator", [None, "", "0"], ids=["unset", "empty", "0"])
def test_nothing_happens_while_the_variable_is_off(emulator: str | None) -> None:
    assert run(STATE, emulator=emulator).stdout == "[] [] None None False\n"


def test_python_starts_without_torch_while_the_variable_is_on() -> None:
    assert run("import sys; print('torch' in sys.modules)", emulator="1").stdout == "False\n"


def test_torch_npu_misses_cann_while_the_variable_is_off() -> None:
    result = run("import torch_npu", emulator=None)
    assert result.returncode != 0
    assert "libhccl.so" in result.stderr


def test_kernels_cannot_be_imported_by_accident() -> None:
    for emulator in (None, "1"):  # also not before torch_npu
        result = run("import npu_emulator.kernels", emulator=emulator)
        assert result.returncode != 0
        assert "set NPU_EMULATOR=1 and `import torch_npu`" in result.stderr


def test_importing_the_package_changes_nothing() -> None:
    result = run("import npu_emulator, sys; print('torch' in sys.modules)", emulator=None)
    assert result.stdout == "False\n"


def _import_error(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: "), result.stderr
    return last


def test_missing_libraries_are_named_with_the_command_that_builds_them(tmp_path: Path) -> None:
    result = run("import torch_npu", emulator="1", NPU_EMULATOR_BUILD=str(tmp_path))
    line = _import_error(result)
    assert str(tmp_path) in line
    assert "python -m npu_emulator.build" in line


def test_libraries_of_other_sources_are_refused(tmp_path: Path) -> None:
    shutil.copytree(_libraries.folder(), tmp_path, dirs_exist_ok=True)
    stamp = tmp_path / "stamp.json"
    stamp.write_text(stamp.read_text().replace('"torch_npu": "', '"torch_npu": "0.'))
    assert "out of date" in _import_error(
        run("import torch_npu", emulator="1", NPU_EMULATOR_BUILD=str(tmp_path))
    )


def test_a_real_cann_is_never_replaced(tmp_path: Path) -> None:
    shutil.copy(_libraries.folder() / "libascendcl.so", tmp_path)
    line = _import_error(run("import torch_npu", emulator="1", LD_LIBRARY_PATH=str(tmp_path)))
    assert "a real CANN is here" in line


def test_an_unknown_value_of_the_variable_is_refused() -> None:
    assert "NPU_EMULATOR='yes'" in _import_error(run("import torch_npu", emulator="yes"))


def test_child_processes_are_emulated_too() -> None:
    program = (
        "import subprocess, sys, torch, torch_npu\n"
        "print(subprocess.run([sys.executable, '-c',"
        "'import torch_npu, torch; print(torch.ones(2, device=\"npu:1\").sum().item())'],"
        "capture_output=True, text=True).stdout)"
    )
    assert run(program, emulator="1").stdout.strip().endswith("2.0")


def test_autoload_by_torch_works_as_on_hardware() -> None:
    program = "import torch; print(torch.ones(2, device='npu').add(1).tolist())"
    result = run(program, emulator="1", TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert result.stdout.strip().endswith("[2.0, 2.0]"), result.stderr


def test_a_torch_for_yet_another_accelerator_is_refused() -> None:
    result = run("import torch; torch.version.hip = '7.0'; import torch_npu", emulator="1")
    assert "is built for another accelerator; install torch+cpu" in _import_error(result)
