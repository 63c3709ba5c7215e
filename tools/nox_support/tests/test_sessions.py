"""The sessions that nox lists, and which environment the training job gets."""

import json
import subprocess
import sys

import pytest

from nox_support import house, training


def listed(*arguments: str) -> dict[str, list[str]]:
    """Session names and tags as nox sees them."""
    command = [sys.executable, "-m", "nox", "--list", "--json", *arguments]
    result = subprocess.run(command, cwd=house.ROOT, capture_output=True, text=True, check=True)
    return {session["name"]: session["tags"] for session in json.loads(result.stdout)}


def test_every_package_has_a_session_on_each_of_its_backends() -> None:
    sessions = listed()
    for package, backends in house.TESTED_BACKENDS.items():
        for backend in backends:
            assert {package, backend} <= set(sessions[f"tests-{package}-{backend}"])
    for backend in house.BACKENDS:
        assert backend in sessions[f"integration-{backend}"]


def test_the_default_run_leaves_out_only_the_benchmarks_the_training_job_whole_matrices_and_what_writes() -> (
    None
):
    command = [sys.executable, "-m", "nox", "--list"]
    output = subprocess.run(command, cwd=house.ROOT, capture_output=True, text=True, check=True).stdout
    skipped = {line.split()[1] for line in output.splitlines() if line.startswith("- ")}
    assert skipped == {"bench", "full-hp-dtensor", "op-table", "train", "training-curves"}


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ([], "torch"),
        (["--nproc", "2", "--steps=30"], "torch"),
        (["--platform", "mindspore"], "mindspore"),
        (["--platform=mindspore", "--nproc", "2"], "mindspore"),
        (["--platform", "torch", "--device", "cpu"], "torch"),
        (["--device", "npu"], "npu"),
        (["--device=npu"], "npu"),
        (["--platform"], "torch"),
        (["--device", "npu", "--device", "cpu"], "torch"),
    ],
)
def test_the_training_job_gets_the_environment_of_its_options(options: list[str], environment: str) -> None:
    assert training.environment_for(options) == environment
