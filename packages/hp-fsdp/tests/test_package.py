"""The package imports alone, fast, and offers what it says."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import hp_fsdp


def test_import_loads_no_framework() -> None:
    script = (
        "import sys, hp_fsdp; print(sorted({'torch', 'torch_npu', 'mindspore', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_installed_metadata_and_module_agree_on_the_version() -> None:
    assert importlib.metadata.version("hp-fsdp") == hp_fsdp.__version__


def test_type_checkers_and_python_see_the_same_names() -> None:
    tree = ast.parse(Path(hp_fsdp.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    assert {"__version__", *(alias.asname for node in block.body for alias in node.names)} == set(
        hp_fsdp.__all__
    )


def test_every_public_name_loads_and_explains_itself() -> None:
    for name in hp_fsdp.__all__:
        assert getattr(hp_fsdp, name).__doc__, name
    assert set(hp_fsdp.__all__) <= set(dir(hp_fsdp))
