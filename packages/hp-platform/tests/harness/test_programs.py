"""Programs that run in a forked process print, fail and end as `python <arguments>` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hp_platform.testing.backends import select
from hp_platform.testing.programs import Programs

sys.path.insert(0, str(Path(__file__).parent))
from processes import assert_gone

pytestmark = pytest.mark.once
BACKEND = next(iter(select(os.environ).running), "torch")

SPAWNS = """
import os, sys
import helper
from hp_platform.launch import spawn
if __name__ == "__main__":
    print(sys.argv, helper.WORD, os.getcwd())
    print(len(set(spawn(os.getpid, 2))), len(set(spawn(os.getppid, 2))), file=sys.stderr)
    sys.exit(3)
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_a_program_has_its_arguments_folder_streams_workers_and_code(
    programs: Programs, tmp_path: Path, as_module: bool
) -> None:
    (tmp_path / "program.py").write_text(SPAWNS)
    (tmp_path / "helper.py").write_text("WORD = 'beside it'")
    arguments = ["-m", "program", "a", "b"] if as_module else ["program.py", "a", "b"]
    done = programs.run(BACKEND, arguments, cwd=tmp_path, timeout=60)
    name = str(tmp_path / "program.py") if as_module else "program.py"
    assert done.stdout == f"{[name, 'a', 'b']} beside it {tmp_path}\n"
    assert done.stderr == "2 1\n"
    assert done.returncode == 3


def test_a_program_that_fails_shows_its_traceback(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("raise ValueError('it is bad')")
    done = programs.run(BACKEND, ["program.py"], cwd=tmp_path, timeout=60)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: it is bad\n")


def test_a_program_that_takes_too_long_is_ended(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os, time; print(os.getpid()); time.sleep(100)")
    with pytest.raises(subprocess.TimeoutExpired) as late:
        programs.run(BACKEND, ["program.py"], cwd=tmp_path, timeout=2)
    assert_gone([int(str(late.value.output))], 1)
