"""What lets torch_npu load beside a torch for CUDA, where such a torch is installed; with the CPU build the same holds."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from npu_emulator import _libraries

ALLOCATE = """
import torch, torch_npu
try:
    torch.empty(48 << 20, dtype=torch.uint8, device="npu")
except torch.OutOfMemoryError:
    print("refused")
else:
    print("allocated")
"""


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.mark.parametrize(("fraction", "answer"), [("1.0", "allocated"), ("0.5", "refused")])
def test_a_setting_that_cuda_has_too_acts_on_the_npu(fraction: str, answer: str) -> None:
    settings = f"per_process_memory_fraction:{fraction}"
    result = run(ALLOCATE, NPU_EMULATOR="1", NPU_EMULATOR_MEMORY_MB="64", PYTORCH_NPU_ALLOC_CONF=settings)
    assert result.stdout.splitlines()[-1:] == [answer], result.stderr


def test_no_cuda_device_is_seen_where_the_emulation_is_on() -> None:
    program = "import os; print(repr(os.environ.get('CUDA_VISIBLE_DEVICES')))"
    assert run(program, NPU_EMULATOR="1", CUDA_VISIBLE_DEVICES="0").stdout == "''\n"
    assert run(program, NPU_EMULATOR="0", CUDA_VISIBLE_DEVICES="0").stdout == "'0'\n"


def test_a_torch_that_does_not_export_the_set_of_keys_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    other = tmp_path / "lib" / "libtorch_python.so"  # any library without torch's functions
    shutil.copy(_libraries.folder() / "libascendcl.so", other)
    program = (
        "from pathlib import Path; from npu_emulator import _beside_cuda;"
        f"_beside_cuda.release_keys(Path({str(tmp_path)!r}))"
    )
    last = run(program, NPU_EMULATOR="0").stderr.splitlines()[-1]
    assert last.startswith("ImportError: torch_npu does not load beside this build of torch for CUDA")
    assert last.endswith("install torch+cpu")
