"""Tests of what only MindSpore has; collected only where it is installed, and run where it is among the backends asked for."""

from __future__ import annotations

import importlib.util
import os

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("mindspore") else ["test_*.py"]


@pytest.fixture(scope="session")
def platform():
    """The platform, with errors where they happen."""
    from hp_platform.platform import ENVIRONMENT_VARIABLE, get_platform

    os.environ.setdefault(ENVIRONMENT_VARIABLE, "mindspore")
    found = get_platform()
    if found.platform_type.value != "mindspore":
        pytest.skip("this process runs another framework: set HYPER_PARALLEL_PLATFORM=mindspore")
    from hp_platform.mindspore.blocking import launch_blocking

    launch_blocking()
    return found
