"""Tests of what only PyTorch has; collected only where it is installed, those of transformers where that is installed, too."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [
    pattern
    for package, pattern in (("torch", "test_*.py"), ("transformers", "test_transformers*.py"))
    if importlib.util.find_spec(package) is None
]
