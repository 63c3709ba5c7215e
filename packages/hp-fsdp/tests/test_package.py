"""The package imports alone, fast, and offers what it says."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import hp_fsdp
from hp_platform.testing import assert_exports


def test_import_loads_no_framework() -> None:
    script = (
        "import sys, hp_fsdp; print(sorted({'torch', 'torch_npu', 'mindspore', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_installed_metadata_and_module_agree_on_the_version() -> None:
    assert importlib.metadata.version("hp-fsdp") == hp_fsdp.__version__


def test_every_public_name_loads_explains_itself_and_is_seen_by_type_checkers() -> None:
    assert_exports(hp_fsdp)
