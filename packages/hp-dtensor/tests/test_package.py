"""What a user meets first: the names, and what importing them costs."""

import importlib.metadata
import subprocess
import sys

import hp_dtensor
from hp_platform.testing import assert_exports


def test_import_loads_no_framework_and_no_numpy() -> None:
    script = "import sys, hp_dtensor; print(sorted({'torch', 'torch_npu', 'mindspore', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_placements_need_no_framework() -> None:
    script = "import sys; from hp_dtensor import Shard, Partial, Replicate; print('torch' in sys.modules, Shard(0))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False Shard(0)"


def test_every_public_name_loads_explains_itself_and_is_seen_by_type_checkers() -> None:
    assert_exports(hp_dtensor)


def test_installed_metadata_and_module_agree_on_the_version() -> None:
    assert importlib.metadata.version("hp-dtensor") == hp_dtensor.__version__
