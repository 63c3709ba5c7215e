"""The command: listing, running, refusing."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import memory
from bench.__main__ import main
from bench.case import Better, Case, Measure, Sample, Side
from bench.cases import CASES
from bench.conditions import Conditions


def side(value: float) -> Side:
    @contextmanager
    def run() -> Iterator[Measure]:
        yield lambda: Sample(value)

    return run


FAST = Case("fast", "is fast", side(1), side(2), "the peer", "ms", Better.LOWER, 0.5)
SLOW = Case("slow", "is slow", side(2), side(1), "the peer", "ms", Better.LOWER, 1.0)


def test_runs_every_case_and_prints_json_and_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    assert main(["--json", str(file)], {"fast": FAST}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[0])["ratio"] == 0.5
    assert lines[-1].startswith("| fast | 1 | 2 (the peer) | ms | 0.500 |")
    assert file.read_text().splitlines() == [lines[0]]


def test_a_missed_goal_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], {"fast": FAST, "slow": SLOW}) == 1
    assert main(["fast"], {"fast": FAST, "slow": SLOW}) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quick"], "no case is named quick; the cases are: fast"),
        (["--rounds", "0"], "--rounds is 0; at least one is needed"),
    ],
)
def test_a_wrong_call_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments, {"fast": FAST})
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_listing_needs_no_framework() -> None:
    script = (
        "import sys; from bench.__main__ import main; main(['--list']); assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(CASES)


def test_the_conditions_name_hardware_versions_and_commit() -> None:
    conditions = Conditions.here()
    assert "cores of" in conditions.hardware
    assert "python" in conditions.versions
    assert conditions.commit


def test_the_host_peak_sees_an_allocation() -> None:
    if not memory.reset_host_peak():
        pytest.skip("this kernel offers no reset of the peak")
    before = memory.host_peak_bytes()
    block = bytearray(64 * 2**20)
    after = memory.host_peak_bytes()
    assert before is not None
    assert after is not None
    assert after - before > len(block) // 2
