"""What is read of runs, and the picture that is made of it."""

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from training_curves import curves, runs
from training_curves.__main__ import PICTURE, main
from training_curves.drawing import drawing


def finished(folder: Path, bits: list[float], validation: float) -> Path:
    folder.mkdir(parents=True)
    rows = [{"step": step + 1, "loss": value * math.log(2)} for step, value in enumerate(bits)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / curves.OUTPUT).write_text(f"step 1/1\nvalidation after:  {validation} bits per byte\n")
    return folder


def falling(start: float, end: float, steps: int = 40) -> list[float]:
    return [start + (end - start) * step / (steps - 1) for step in range(steps)]


def test_a_curve_is_a_mean_over_the_last_steps_and_knows_its_score(tmp_path: Path) -> None:
    curve = curves.read(finished(tmp_path / "a", falling(8.0, 4.0), 3.5), "adamw", "1e-2")
    assert curve.validation == 3.5
    assert curve.bits[0] == 8.0
    assert curve.bits[-1] == pytest.approx(sum(falling(8.0, 4.0)[-20:]) / 20)


def test_a_run_without_an_end_is_told(tmp_path: Path) -> None:
    folder = finished(tmp_path / "a", [1.0], 1.0)
    (folder / curves.OUTPUT).write_text("step 1/9\n")
    with pytest.raises(ValueError, match="has no finished run: remove it, and start again"):
        curves.read(folder, "adamw", "1e-2")


def test_the_best_run_and_the_step_at_which_it_gets_there() -> None:
    slow = curves.Curve("muon", "1e-3", curves.smoothed(falling(8.0, 6.0)), 6.0)
    fast = curves.Curve("muon", "1e-2", curves.smoothed(falling(8.0, 2.0)), 2.0)
    assert curves.best([slow, fast], "muon") is fast
    step = curves.first_below(fast, 5.0)
    assert step is not None and fast.bits[step - 1] <= 5.0 < fast.bits[step - 2]
    assert curves.first_below(slow, 5.0) is None


def test_finished_runs_are_not_repeated_and_make_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for optimizer, end in (("adamw", 4.0), ("muon", 3.0)):
        for place, rate in enumerate(runs.RATES[optimizer]):
            finished(tmp_path / f"{optimizer}-{rate}", falling(8.0, end + place), end + place)
    picture = tmp_path / "picture.svg"
    assert main(["--out", str(tmp_path), "--steps", "40", "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "| adamw | 3e-3 | " in printed
    assert "Muon's best run has what AdamW's best run ends with" in printed and "at step 3" in printed
    assert picture.read_text() == drawing(runs.run(runs.Job(tmp_path, 40, 16)))
    root = ElementTree.fromstring(picture.read_text())
    assert sum(child.get("fill") == "none" for child in root) == 6


def test_the_guide_has_the_picture() -> None:
    assert f"({PICTURE.name})" in (PICTURE.parent / "optimizers.md").read_text()
    ElementTree.fromstring(PICTURE.read_text())
