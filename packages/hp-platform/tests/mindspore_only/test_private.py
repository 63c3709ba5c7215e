"""Private names of MindSpore: gathered in one file, checked at start-up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


@pytest.fixture
def private(platform):
    from hp_platform.mindspore import _private

    return _private


def test_the_installed_mindspore_has_every_name(private):
    private.check()
    assert len(private.NAMES) > 20


def test_a_missing_name_is_told_with_what_to_install(private):
    wrong = [
        *private.NAMES,
        ("mindspore", "Tensor._of_another_version"),
        ("mindspore.no_such_module", "name"),
    ]
    with pytest.raises(RuntimeError) as caught:
        private.check(wrong)
    message = str(caught.value)
    assert "lacks" in message
    assert "mindspore.Tensor._of_another_version, mindspore.no_such_module.name" in message
    assert "_grad_node" not in message
    assert message.endswith("install 'mindspore==2.10.0'")


def test_numpy_2_is_refused_before_it_fails(private):
    with pytest.raises(RuntimeError, match=r"NumPy 2\.4\.6; install 'numpy<2'"):
        private.check(numpy_version="2.4.6")


def test_no_other_file_uses_a_private_name(private):
    names = {part for _, name in private.NAMES for part in name.split(".") if part.startswith("_")}
    names = names | {"_params", "_cells", "_buffers", "_unique_id"}
    assert "_grad_node" in names
    pattern = re.compile(
        r"(?<![\w.])(?:\w+\.)+(" + "|".join(sorted(names)) + r")\b|[\"'](_params|_cells|_buffers)[\"']"
    )
    folder = Path(private.__file__).parent
    found = []
    for path in sorted(folder.rglob("*.py")):
        if path.name != "_private.py":
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if pattern.search(line) and "_private." not in line:
                    found.append(f"{path.relative_to(folder)}:{number}: {line.strip()}")
    # A parameter's table is asked by name while the cell is still being built, when no accessor works yet.
    assert [line for line in found if 'tables.get("' not in line] == []
