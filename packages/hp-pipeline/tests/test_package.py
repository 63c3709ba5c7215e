"""What holds for the package before it has code: it imports alone, and its version is written once."""

import importlib.metadata
import subprocess
import sys

import hp_pipeline


def test_import_loads_no_framework() -> None:
    script = "import sys, hp_pipeline; print(sorted({'torch', 'torch_npu', 'mindspore'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_installed_metadata_and_module_agree_on_the_version() -> None:
    assert importlib.metadata.version("hp-pipeline") == hp_pipeline.__version__
