"""What holds for the package as a whole: it imports alone, its names load, and its version is written once."""

import importlib.metadata
import subprocess
import sys

import hp_recompute
from hp_platform.testing import assert_exports


def test_import_loads_no_framework() -> None:
    script = "import sys, hp_recompute; print(sorted({'torch', 'torch_npu', 'mindspore', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_all_public_names_load_and_explain_themselves() -> None:
    assert_exports(hp_recompute)


def test_installed_metadata_and_module_agree_on_the_version() -> None:
    assert importlib.metadata.version("hp-recompute") == hp_recompute.__version__
