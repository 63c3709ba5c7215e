"""The examples of the packages' READMEs do what the READMEs say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[1] / "packages"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
EXPECTED = {
    "hp-platform": ([], ["[[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]"]),
    "hp-dtensor": ([], ["((Shard(1),), 16.0, 32.0)"]),
    "hp-optim": ([], ["((Shard(0),), 1.96)"]),
    "hyper-parallel": (TORCHRUN, ["torch.Size([2, 2]) 56.0"]),
}

pytestmark = pytest.mark.once  # the examples are programs of torch on cpu


@pytest.mark.parametrize("package", EXPECTED)
def test_the_example_prints_what_its_readme_says(package: str, tmp_path: Path) -> None:
    text = (PACKAGES / package / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    launcher, lines = EXPECTED[package]
    done = subprocess.run(
        [sys.executable, *launcher, tmp_path / "example.py"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == lines
    for line in lines:
        assert line in text
