"""The public names: each loads, is the package's own, and is known to type checkers too."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hyper_parallel
from hp_platform.testing import assert_exports

PUBLIC = [name for name in hyper_parallel.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_loads_and_is_its_packages_own(name: str) -> None:
    thing = getattr(hyper_parallel, name)
    place = hyper_parallel._WHERE[name]
    module = place if place.startswith("hp_") else f"hyper_parallel.{place}"
    assert thing is getattr(sys.modules[module], name)
    assert thing.__doc__


def test_every_name_explains_itself_and_is_seen_by_type_checkers() -> None:
    assert_exports(hyper_parallel)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'hyper_parallel' has no attribute 'fully_shard_all'"):
        hyper_parallel.fully_shard_all  # noqa: B018


def test_importing_brings_no_framework() -> None:
    code = "import sys, hyper_parallel; print([m for m in ('torch', 'mindspore', 'numpy', 'rich') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )
