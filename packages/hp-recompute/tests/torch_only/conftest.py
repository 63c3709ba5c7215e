"""Tests of what only PyTorch has; collected only where it is installed."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch") is not None else ["test_*.py"]
