"""What tests of the plugin put into the tests that run inside, and read of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pids(pytester: pytest.Pytester, name: str) -> list[int]:
    return [int(file.read_text()) for file in sorted(pytester.path.glob(f"{name}.*"))]
