"""The import contracts of the root pyproject.toml can fail: each is shown an import that it must refuse."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (
    "hp_platform", "hp_dtensor", "hp_fsdp", "hp_tp", "hp_moe", "hp_pipeline", "hp_optim", "hp_recompute", "hyper_parallel",
)  # fmt: skip


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """Nine empty packages under the real contracts."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    return tmp_path


def lint_imports(house: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(house)}
    return subprocess.run(command, cwd=house, env=environment, capture_output=True, text=True, check=False)


def add(house: Path, file: str, statement: str) -> None:
    path = house / file
    for folder in reversed(path.relative_to(house).parents[:-1]):
        (house / folder).mkdir(exist_ok=True)
        (house / folder / "__init__.py").touch()
    path.write_text(statement + "\n")


ALLOWED = [
    ("hp_platform/torch/tensor.py", "import torch"),
    ("hp_platform/torch/npu.py", "import torch_npu"),
    ("hp_platform/mindspore/tensor.py", "from mindspore import mint"),
    ("hp_dtensor/_torch.py", "import torch.nn"),
    ("hp_dtensor/_mindspore.py", "import mindspore"),
    ("hp_dtensor/_torch/tensor.py", "import torch.nn"),
    ("hp_platform/platform.py", "def load():\n    import hp_platform.torch"),
    ("hp_fsdp/state.py", "import hp_dtensor, hp_platform"),
    ("hyper_parallel/cli.py", "import hp_fsdp, hp_tp, hp_recompute"),
]
REFUSED = [
    ("hp_platform/mesh.py", "import torch"),
    ("hp_platform/testing/pool.py", "def start():\n    import torch.distributed"),
    ("hp_fsdp/state.py", "import torch_npu"),
    ("hp_dtensor/_torch.py", "import mindspore"),
    ("hp_dtensor/_mindspore.py", "import torch"),
    ("hp_platform/mindspore/tensor.py", "import torch"),
    ("hp_platform/platform.py", "import hp_dtensor"),
    ("hp_dtensor/spec.py", "import hp_fsdp"),
    ("hp_fsdp/state.py", "import hp_tp"),
    ("hp_recompute/swap.py", "import hp_dtensor"),
    ("hp_pipeline/runtime.py", "import hp_recompute"),
    ("hp_optim/muon.py", "import hyper_parallel"),
]


def test_all_that_the_arrows_allow_passes(house: Path) -> None:
    for file, statement in ALLOWED:
        add(house, file, statement)
    result = lint_imports(house)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(("file", "statement"), REFUSED)
def test_refuses(house: Path, file: str, statement: str) -> None:
    add(house, file, statement)
    result = lint_imports(house)
    assert result.returncode == 1, result.stdout
    assert "BROKEN" in result.stdout
