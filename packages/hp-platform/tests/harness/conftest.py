"""Runs of pytest inside of pytest, for tests of the plugin."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest

HEAD = """
import os, sys, time, signal, threading, warnings
from pathlib import Path
import pytest
from hp_platform.testing import World, distributed
def note(name, world):
    Path(f"{name}.{world.rank}").write_text(str(os.getpid()))
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pytest.RunResult]:
    """Run pytest on a file with the given text."""
    # Backends whose presence can be told without starting a process.
    monkeypatch.setenv("HP_TEST_BACKENDS", "torch,mindspore")
    monkeypatch.delenv("HP_REQUIRE_BACKENDS", raising=False)
    monkeypatch.delenv("HP_TEST_TIMEOUT_SCALE", raising=False)
    monkeypatch.delenv("HP_TEST_DEVICES", raising=False)  # of the run that this test is in
    pytester.makeini(
        "[pytest]\naddopts = -p hp_platform.testing.plugin --import-mode=importlib -p no:cacheprovider\nfilterwarnings = error\n"
    )

    def run_text(text: str = "", *options: str, then: str = "") -> pytest.RunResult:
        if text:
            pytester.makepyfile(test_inner=HEAD + textwrap.dedent(text) + then)
        return pytester.runpytest_inprocess(*options)

    return run_text
