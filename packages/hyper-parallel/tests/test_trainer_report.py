"""What a run leaves and shows, also when it diverged or was killed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hyper_parallel.trainer.generate import printable
from hyper_parallel.trainer.report import Report, draw_loss, read_metrics
from hyper_parallel.trainer.results import METRICS

pytestmark = pytest.mark.once


def write(folder: Path, losses: list[float], first_step: int = 0) -> None:
    with Report(folder, steps=first_step + len(losses), first_step=first_step) as report:
        for step, loss in enumerate(losses, first_step + 1):
            report.step(step, loss=loss, tokens_per_second=1.0, memory=2**20, lr=0.1)


def test_a_resumed_run_drops_half_a_line_and_what_it_does_again(tmp_path: Path) -> None:
    write(tmp_path, [5.0, 4.0, 3.0])
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 4, "lo')
    write(tmp_path, [2.0], first_step=2)
    assert [(row["step"], row["loss"]) for row in read_metrics(tmp_path)] == [(1, 5.0), (2, 4.0), (3, 2.0)]


@pytest.mark.parametrize("losses", [[5.0, 4.0], [5.0, math.nan], [math.nan, math.inf]])
def test_a_curve_is_drawn_of_a_run_that_diverged_too(tmp_path: Path, losses: list[float]) -> None:
    write(tmp_path, losses)
    draw_loss(tmp_path, first_step=0, before=losses[0], after=losses[-1], title="a run")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_rows_are_json(tmp_path: Path) -> None:
    write(tmp_path, [5.0])
    assert json.loads((tmp_path / METRICS).read_text()) == {
        "step": 1,
        "loss": 5.0,
        "tokens_per_second": 1.0,
        "memory_bytes": 2**20,
        "lr": 0.1,
    }


def test_generated_bytes_do_not_steer_a_terminal() -> None:
    assert printable(
        b"caf\xc3\xa9\t1\n\x1b[2J\r\x07\xff"
    ) == "caf\N{LATIN SMALL LETTER E WITH ACUTE}\t1\n" + (
        "\N{REPLACEMENT CHARACTER}[2J" + 3 * "\N{REPLACEMENT CHARACTER}"
    )
