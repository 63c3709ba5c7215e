"""The suite cannot fall behind: every public name of the Protocols occurs in its tests.

The launches of :class:`CommOps` are raw, and their callers hold their promises: they are tested through
:mod:`hp_platform.collectives` on several processes. Here it is only asserted that each of them has a caller.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from pathlib import Path

import pytest

import hp_platform
from hp_platform import protocols
from hp_platform.protocols.comm import CommOps, NativeWork

SOURCES = Path(hp_platform.__file__).parent
SINGLE_PROCESS = [
    getattr(protocols, name)
    for name in protocols.__all__
    if getattr(protocols, name) not in (CommOps, NativeWork)
]


def public_names(protocol: type) -> set[str]:
    return {
        name for name in {**vars(protocol), **inspect.get_annotations(protocol)} if not name.startswith("_")
    }


def names_used_in(files: Iterable[Path]) -> set[str]:
    """Every ``something.name`` in these files."""
    trees = [ast.parse(file.read_text()) for file in files]
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("protocol", SINGLE_PROCESS, ids=lambda p: p.__name__)
def test_every_primitive_is_exercised(protocol):
    names = public_names(protocol)
    assert names, f"{protocol.__name__} has no public names: this test looks in the wrong place"
    missing = names - names_used_in(
        file for file in Path(__file__).parent.glob("*.py") if file != Path(__file__)
    )
    assert not missing, f"no conformance test exercises {protocol.__name__}: {sorted(missing)}"


def test_every_launch_has_a_caller_in_shared_code():
    rooms = {SOURCES / "torch", SOURCES / "mindspore", SOURCES / "protocols"}
    shared = [file for file in SOURCES.rglob("*.py") if not rooms & set(file.parents)]
    missing = public_names(CommOps) - names_used_in(shared)
    assert not missing, (
        f"nothing calls {sorted(missing)}: a primitive that nobody needs does not belong into the Protocol"
    )
