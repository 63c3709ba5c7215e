"""Tests of what only MindSpore has; collected only where it is installed."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("mindspore") else ["test_*.py"]
