"""`bench fsdp` and `bench fsdp-host-*` as they run: small, on processes of the host."""

import json
import math
from pathlib import Path

import pytest

from bench.cases import fsdp
from bench.cases.fsdp_host import measure_host
from bench.cases.fsdp_row import FUNCTIONS_HEADER, SEGMENTS_HEADER
from bench.ranks import on_ranks

pytestmark = pytest.mark.once  # the ranks are processes of torch on cpu

SMALL = ("--rounds", "1", "--warm", "3", "--steps", "2", "--layers", "2", "--length", "16")


def rows_of(file: Path, *arguments: str) -> list[dict]:
    fsdp.main([*arguments, *SMALL, "--json", str(file)])
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_both_sides_train_alike_with_recompute_and_a_profile_says_what_the_host_does(tmp_path: Path) -> None:
    row, *profiles = rows_of(tmp_path / "rows", "8b-batch1-recompute", "--ranks", "2", "--profile")
    assert row["losses_apart"] < 1e-3
    losses = {side: found["losses"] for side, found in row["sides"].items()}
    assert len(losses["ours"]) == 3
    assert losses["ours"][0] == pytest.approx(math.log(256), rel=0.02)  # nothing is learnt yet
    # A rank alone sees the gradients of its own tokens only, so its losses go another way.
    assert losses["limit"][0] == losses["FSDP2"][0]
    assert losses["limit"][2] != losses["FSDP2"][2]
    assert [each["side"] for each in profiles] == ["ours", "FSDP2", "limit"]
    for each in profiles:
        assert each["gpu"] is None
        assert each["host"]["wall"] > 0 < each["host"]["processor"]


def test_a_world_of_one_works(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path / "rows", "1b-batch2", "--ranks", "1")
    assert row["num_ranks"] == 1
    assert row["losses_apart"] < 1e-3
    # The limit is then the same training but for float32 weights, and for the optimizer, which trains something else.
    assert row["sides"]["limit"]["losses"][0] == pytest.approx(row["sides"]["ours"]["losses"][0], rel=1e-3)


@pytest.mark.parametrize("option", [(), ("--own-adamw",)], ids=["torchs-adamw", "own-adamw"])
def test_replicas_train_alike(tmp_path: Path, option: tuple[str, ...]) -> None:
    (row,) = rows_of(tmp_path / "rows", "1b-batch1-hsdp", "--ranks", "4", *option)
    assert row["setting"]["replicas"] == 2
    assert row["setting"]["own_adamw"] is bool(option)
    assert row["case"].endswith("-own-adamw") is bool(option)
    assert row["losses_apart"] < 1e-3


def test_the_parts_of_a_step_make_it_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, *parts = rows_of(tmp_path / "rows", "8b-batch1-recompute", "--ranks", "2", "--segments")
    assert [each["side"] for each in parts] == ["ours", "FSDP2", "limit"]
    for each in parts:
        found = each["milliseconds"]
        assert min(found.values()) > 0
        # Of two blocks there is one way from one to the other; medians of two steps are means.
        assert sum(found.values()) - found["step"] == pytest.approx(found["step"], rel=1e-6)
    lines = capsys.readouterr().out.split(SEGMENTS_HEADER)[1].split("\n")[1:-1]
    assert [line.split(" | ")[1] for line in lines] == ["ours", "FSDP2", "limit"]


def test_the_functions_that_cost_the_host_most_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_of(tmp_path / "rows", "1b-batch1", "--ranks", "1", "--functions", "5")
    lines = capsys.readouterr().out.split(FUNCTIONS_HEADER)[1].split("\n")[1:-1]
    assert [line.split(" | ")[0] for line in lines] == ["| ours"] * 5 + ["| FSDP2"] * 5
    own = [float(line.split(" | ")[1]) for line in lines]
    assert own[:5] == sorted(own[:5], reverse=True)
    assert any("run_backward" in line for line in lines)


def test_sharding_costs_the_host_something() -> None:
    for side in ("ours", "FSDP2"):
        for sample in on_ranks(2, measure_host, side, 2, 2):
            assert sample.value > 0
