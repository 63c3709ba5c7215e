"""The programs in the documentation's pages do what the pages say.

A program is a Python block with a main guard. What it prints is the text of the comments behind its prints, and what it draws is
the picture of that name among the pages.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hp_platform.testing.programs import Programs

PAGES = Path(__file__).parents[1] / "docs" / "pages"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PRINTED = re.compile(r"^\s*print\(.*\)  # (.*)$", re.MULTILINE)

PROGRAMS = {
    f"{page.stem} {number}": block
    for page in sorted(PAGES.glob("*.md"))
    for number, block in enumerate(BLOCK.findall(page.read_text()))
    if "__main__" in block
}

pytestmark = pytest.mark.once  # the examples are programs of torch on cpu


def test_the_guides_have_programs() -> None:
    assert PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_prints_what_its_page_says(name: str, programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(PROGRAMS[name])
    done = programs.run("torch", ["example.py"], cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    expected = PRINTED.findall(PROGRAMS[name])
    assert expected, "a program of a guide prints something, with the text in a comment behind the print"
    assert done.stdout.splitlines() == expected
    for drawing in tmp_path.glob("*.svg"):
        assert drawing.read_text() == (PAGES / drawing.name).read_text(), f"draw {drawing.name} anew"
