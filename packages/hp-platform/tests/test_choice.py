"""Which framework a process runs: what the variable says, else what is imported, else what is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from hp_platform import _process
from hp_platform import platform as platform_module
from hp_platform.on_platform import when_known
from hp_platform.platform import ENVIRONMENT_VARIABLE, PlatformType, _choose, get_platform

pytestmark = pytest.mark.once

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """``machine(installed, imported)``: which frameworks this Python seems to have."""
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)

    def pretend(installed: tuple[str, ...] = (), imported: tuple[str, ...] = ()) -> None:
        for kind in PlatformType:
            if kind.value in imported:
                monkeypatch.setitem(sys.modules, kind.value, ModuleType(kind.value))
            else:
                monkeypatch.delitem(sys.modules, kind.value, raising=False)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in installed else None)

    return pretend


BOTH = ("torch", "mindspore")


def test_the_variable_decides(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(installed=BOTH, imported=("torch",))
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, " MindSpore ")
    assert _choose() is PlatformType.MINDSPORE


def test_else_what_is_imported_and_else_what_is_installed(machine: Machine) -> None:
    machine(installed=BOTH, imported=("mindspore",))
    assert _choose() is PlatformType.MINDSPORE
    machine(installed=("torch",))
    assert _choose() is PlatformType.PYTORCH


@pytest.mark.parametrize(
    ("installed", "imported", "variable", "kind", "message"),
    [
        ((), (), "", RuntimeError, r"no framework is installed; .* pip install 'hp-platform\[torch\]'"),
        (BOTH, (), "", RuntimeError, f"torch and mindspore are both installed; set {ENVIRONMENT_VARIABLE}"),
        (BOTH, BOTH, "", RuntimeError, f"torch and mindspore are both imported; set {ENVIRONMENT_VARIABLE}"),
        (BOTH, (), "jax", ValueError, "='jax' names no platform; set it to torch or mindspore"),
        (
            ("torch",),
            (),
            "mindspore",
            RuntimeError,
            r"=mindspore, but mindspore is not installed: pip install 'hp-platform\[mindspore\]', or unset",
        ),
    ],
)
def test_what_leads_to_no_framework_says_what_to_change(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    installed: tuple[str, ...],
    imported: tuple[str, ...],
    variable: str,
    kind: type[Exception],
    message: str,
) -> None:
    machine(installed, imported)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, variable)
    with pytest.raises(kind, match=message):
        _choose()


def test_a_process_has_one_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    found = object()
    monkeypatch.setattr(_process.state, "platform", found)
    assert get_platform() is found


def test_what_waits_for_the_platform_runs_once_when_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    known = get_platform()
    monkeypatch.setattr(_process.state, "platform", None)
    when_known(seen.append)
    assert seen == []
    monkeypatch.setattr(platform_module, "_load", lambda kind: known)
    assert get_platform() is known
    assert get_platform() is known
    assert seen == [known]
    when_known(seen.append)
    assert seen == [known, known]
