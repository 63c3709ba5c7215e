"""Which backends a run has, and what it says of those that are absent."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hp_platform.testing import backends

sys.path.insert(0, str(Path(__file__).parent))

pytestmark = pytest.mark.once

pytest_plugins = ("pytester",)


def test_the_header_names_backends_and_what_is_missing(run, monkeypatch) -> None:
    monkeypatch.setattr(
        backends, "_missing", lambda b: "torch is not installed" if b.name == "torch" else None
    )
    result = run("def test_x(): pass\n")
    result.stdout.fnmatch_lines(
        ["backends: mindspore (cpu, mccl)", "backend torch does not run: torch is not installed"]
    )


def test_a_named_but_absent_backend_is_skipped_with_its_reason(run, monkeypatch) -> None:
    monkeypatch.setattr(backends, "_missing", lambda b: f"{b.name} is not installed")
    result = run("@distributed(2)\ndef test_x(): pass\n", "-rs")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["*torch: torch is not installed"])
    result.stdout.fnmatch_lines(["*mindspore: mindspore is not installed"])


def test_a_test_of_other_backends_than_the_runs_is_skipped_with_its_reason(run) -> None:
    result = run("@distributed(2, backends='npu')\ndef test_x(): pass\n", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*npu: runs on npu only; the backends of this run are: *"])


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"HP_TEST_BACKENDS": "torch,gpu"},
            "HP_TEST_BACKENDS: unknown backend 'gpu'; known ones are torch, cuda, npu, mindspore",
        ),
        ({"HP_REQUIRE_BACKENDS": "tpu"}, "HP_REQUIRE_BACKENDS: unknown backend 'tpu'; known ones are*"),
        (
            {"HP_TEST_BACKENDS": "torch", "HP_REQUIRE_BACKENDS": "npu"},
            "HP_REQUIRE_BACKENDS requires npu, but HP_TEST_BACKENDS='torch' leaves it out*",
        ),
        (
            {"HP_REQUIRE_BACKENDS": "mindspore"},
            "HP_REQUIRE_BACKENDS requires mindspore, which cannot run here: it is not installed",
        ),
        ({"HP_TEST_TIMEOUT_SCALE": "slow"}, "HP_TEST_TIMEOUT_SCALE='slow': give a positive number*"),
        ({"HP_TEST_DEVICES": "npu=many"}, "HP_TEST_DEVICES='npu=many': the plugin sets it, such as npu=8*"),
    ],
)
def test_wrong_variables_end_the_run_at_once(run, monkeypatch, variables, message) -> None:
    monkeypatch.setattr(backends, "_missing", lambda b: "it is not installed")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = run("def test_x(): pass\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])


def test_a_required_backend_with_too_few_devices_fails_where_it_would_skip(run, monkeypatch) -> None:
    monkeypatch.setattr(backends, "_missing", lambda b: None)
    monkeypatch.setattr(backends, "_count_devices", lambda b: (2, None))
    monkeypatch.setenv("HP_TEST_BACKENDS", "cuda")
    text = "@distributed(4)\ndef test_x(): pass\n"
    skipped = run(text, "-rs")
    skipped.assert_outcomes(skipped=1)
    skipped.stdout.fnmatch_lines(["*cuda: 4 ranks need 4 devices, and there are 2"])
    monkeypatch.setenv("HP_REQUIRE_BACKENDS", "cuda")
    failed = run(text)
    failed.assert_outcomes(failed=1)
    failed.stdout.fnmatch_lines(
        ["HP_REQUIRE_BACKENDS requires cuda, but 4 ranks need 4 devices, and there are 2"]
    )


def test_devices_are_counted_once_for_all_processes_of_a_run(run, monkeypatch) -> None:
    monkeypatch.setattr(backends, "_missing", lambda b: None)
    monkeypatch.setenv("HP_TEST_BACKENDS", "cuda,npu")
    counted = []
    monkeypatch.setattr(backends, "_count_devices", lambda b: (counted.append(b.name), (2, None))[1])
    text = "import os\ndef test_x(): assert os.environ['HP_TEST_DEVICES'] == 'cuda=2,npu=2'\n"
    run(text).assert_outcomes(passed=1)
    assert counted == ["cuda", "npu"]
    assert "HP_TEST_DEVICES" not in os.environ
    monkeypatch.setenv("HP_TEST_DEVICES", "npu=3")
    result = run("def test_x(): pass\n")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["backends: cuda (2 devices, nccl), npu (3 *devices, hccl)"])
    assert counted == ["cuda", "npu", "cuda"]
