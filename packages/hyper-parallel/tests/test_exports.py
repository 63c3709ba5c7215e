"""The public names: each loads, is the package's own, and is known to type checkers too."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hyper_parallel

PUBLIC = [name for name in hyper_parallel.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_loads_and_is_its_packages_own(name: str) -> None:
    thing = getattr(hyper_parallel, name)
    assert thing is getattr(sys.modules[hyper_parallel._WHERE[name]], name)
    assert thing.__doc__


def test_type_checkers_and_python_see_the_same_names() -> None:
    tree = ast.parse(Path(hyper_parallel.__file__).read_text())
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {
        alias.asname: node.module
        for node in ast.walk(guarded)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == hyper_parallel._WHERE


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'hyper_parallel' has no attribute 'fully_shard_all'"):
        hyper_parallel.fully_shard_all  # noqa: B018


def test_importing_brings_no_framework() -> None:
    code = "import sys, hyper_parallel; print([m for m in ('torch', 'mindspore', 'numpy', 'rich') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )
