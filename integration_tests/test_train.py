"""``hyper-parallel train`` as a user runs it: it learns, equals one process, goes on from a checkpoint, and fails in a line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from hp_platform.testing.backends import select
from hp_platform.testing.programs import Programs
from hyper_parallel.trainer.command import main

SMALL = [
    "--dim",
    "32",
    "--layers",
    "2",
    "--heads",
    "2",
    "--hidden",
    "48",
    "--length",
    "32",
    "--batch",
    "12",
    "--save-every",
    "4",
]
PLACE = {
    "torch": ["--platform", "torch", "--device", "cpu"],
    "cuda": ["--platform", "torch", "--device", "cuda"],
    "npu": ["--platform", "torch", "--device", "npu"],
    "mindspore": ["--platform", "mindspore", "--device", "cpu"],
}
BACKENDS = select(os.environ).running


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "hyper_parallel", "train", *map(str, arguments)]


def train(*arguments: str | Path) -> str:
    """What a successful run prints."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train_warm(programs: Programs, backend: str, *arguments: str | Path) -> str:
    """The same from an interpreter that has its framework imported: for what depends on nothing of the start."""
    options = ["-m", "hyper_parallel", "train", *PLACE[backend], *SMALL, *arguments]
    done = programs.run(backend, [str(option) for option in options], cwd=Path.cwd(), timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def bits(output: str, when: str) -> float:
    (line,) = [line for line in output.splitlines() if line.startswith(f"validation {when}")]
    return float(line.split(":")[1].split()[0])


def rows(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def step_of(out: Path) -> int:
    """How many steps the newest checkpoint has behind it."""
    root = out / "checkpoints"
    index = json.loads((root / (root / "latest").read_text().strip() / "index.json").read_text())
    return int(index["entries"]["run/step"]["value"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_learns_and_leaves_its_results(backend: str, tmp_path: Path) -> None:
    output = train(
        *PLACE[backend], *SMALL, "--nproc", "2", "--steps", "12", "--lr", "0.01", "--out", tmp_path
    )
    # Guessing costs 8 bits; a model that knows no more than which bytes are frequent needs about 4.7.
    assert bits(output, "before") > 7.5
    assert bits(output, "after") < 6.5
    found = rows(tmp_path)
    assert [row["step"] for row in found] == list(range(1, 13))
    assert found[-1]["loss"] < found[0]["loss"] - 0.8
    assert all(row["tokens_per_second"] > 0 and row["memory_bytes"] > 0 for row in found)
    whole = load_file(tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "metrics.jsonl").stat().st_mode
    assert whole["embedding"].shape == (256, 32)
    assert whole["layers.1.feed_forward.down"].shape == (32, 48)
    assert all(np.isfinite(x).all() for x in whole.values())
    assert step_of(tmp_path) == 12
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    (text,) = [line for line in output.splitlines() if line.startswith("generated: The ")]
    assert text


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "npu"])  # HCCL does not reduce float64
def test_in_float64_it_equals_one_process(
    backend: str, optimizer: str, programs: Programs, tmp_path: Path
) -> None:
    nproc = "3" if backend == "torch" else "2"  # 256 rows over 3 ranks: uneven shards
    output = train_warm(
        programs,
        backend,
        "--nproc",
        nproc,
        "--steps",
        "5",
        "--dtype",
        "float64",
        "--optimizer",
        optimizer,
        "--verify",
        "--out",
        tmp_path,
    )
    assert "verify: equal within 1e-10" in output
    # The command's word is checked once more, from the files.
    ours, alone = (
        load_file(tmp_path / "model.safetensors"),
        load_file(tmp_path / "one-process" / "model.safetensors"),
    )
    assert ours.keys() == alone.keys()
    for name, x in ours.items():
        assert x.dtype == np.float64
        np.testing.assert_allclose(x, alone[name], rtol=0, atol=1e-10, err_msg=name)
    losses, others = ([row["loss"] for row in rows(out)] for out in (tmp_path, tmp_path / "one-process"))
    np.testing.assert_allclose(losses, others, rtol=0, atol=1e-10)


@pytest.mark.once
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_by_another_number_of_processes_it_ends_as_if_never_stopped(
    optimizer: str, programs: Programs, tmp_path: Path
) -> None:
    base = ["--dtype", "float64", "--optimizer", optimizer]
    train_warm(programs, "torch", *base, "--nproc", "2", "--steps", "8", "--out", tmp_path / "whole")
    part = tmp_path / "part"
    shutil.copytree(tmp_path / "whole", part)
    # As if it had been killed after the checkpoint at step 4, while writing the next one.
    (part / "checkpoints" / "latest").write_text("000001\n")
    (part / "checkpoints" / "000002" / "index.json").unlink()
    train_warm(programs, "torch", *base, "--nproc", "3", "--steps", "8", "--resume", "--out", part)
    assert [row["step"] for row in rows(part)] == list(range(1, 9))
    ours, whole = load_file(part / "model.safetensors"), load_file(tmp_path / "whole" / "model.safetensors")
    for name, x in ours.items():
        np.testing.assert_allclose(x, whole[name], rtol=0, atol=1e-10, err_msg=name)


@pytest.mark.once
def test_a_killed_worker_ends_the_job_in_a_line_and_the_checkpoint_before_stays_whole(tmp_path: Path) -> None:
    job = subprocess.Popen(
        command(*PLACE["torch"], *SMALL, "--nproc", "2", "--steps", "100000", "--out", tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    newest = tmp_path / "checkpoints" / "latest"
    deadline = time.monotonic() + 120
    while not newest.exists():
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    workers = [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
    victim = next(
        pid for pid in workers if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    )
    os.kill(victim, signal.SIGKILL)
    _, errors = job.communicate(timeout=30)
    assert job.returncode == 1
    (line,) = errors.splitlines()
    assert line.startswith("hyper-parallel train: rank 1 of 2 was killed by signal 9 (SIGKILL)")
    for pid in workers:
        assert not Path(f"/proc/{pid}").exists()
    step = step_of(tmp_path)
    assert step % 4 == 0
    output = train(
        *PLACE["torch"], *SMALL, "--nproc", "2", "--steps", step + 2, "--resume", "--out", tmp_path
    )
    assert f"step {step + 2}/{step + 2}" in output


BAD = {
    "unknown option": (
        ["--learning-rate", "1"],
        "unrecognized arguments: --learning-rate 1 (see hyper-parallel train --help)",
    ),
    "abbreviated option": (["--step", "3"], "unrecognized arguments: --step 3"),
    "option without value": (["--steps"], "argument --steps: expected one argument"),
    "not a number": (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
    "unknown dtype": (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
    "unknown optimizer": (["--optimizer", "sgd"], "argument --optimizer: invalid choice: 'sgd'"),
    "no steps": (["--steps", "0"], "--steps must be at least 1, got 0"),
    "no processes": (["--nproc", "0"], "--nproc must be at least 1, got 0"),
    "far too many processes": (
        ["--nproc", "1000", "--batch", "1000"],
        "--nproc 1000: this machine has room for",
    ),
    "negative seed": (["--seed", "-1"], "--seed must be 0 or more, got -1"),
    "absurd rate": (["--lr", "2"], "--lr must lie between 0 and 1, got 2.0"),
    "batch that does not divide": (
        ["--batch", "10", "--nproc", "4"],
        "--batch 10 does not divide over 4 processes: give a multiple of 4",
    ),
    "width that does not divide": (
        ["--dim", "33"],
        "--dim 33 must be a multiple of twice --heads 2 (rotary attention turns pairs): try --dim 32",
    ),
    "missing data": (["--data", "{tmp}/absent.txt"], "absent.txt: no such file or folder"),
    "empty data": (["--data", "{tmp}/empty.txt"], "empty.txt is empty"),
    "binary data": (["--data", "{tmp}/binary"], "binary is binary (a zero byte at position 3): give text"),
    "short data": (
        ["--data", "{tmp}/short.txt"],
        "short.txt has 5 bytes, too short: sequences of 32 need at least 132",
    ),
    "nothing to resume": (["--resume"], "--resume: there is no checkpoint in"),
    "resume and overwrite": (["--resume", "--overwrite"], "leave out one of them"),
    "out of another run": (
        ["--out", "{tmp}/old"],
        "old holds another run: go on with it (--resume), give another --out, or remove it first (--overwrite)",
    ),
    "verify of a part": (["--verify", "--resume"], "--verify compares whole runs; leave out --resume"),
    "out that is a file": (["--out", "{tmp}/short.txt"], "short.txt: cannot be made: File exists"),
    "device that is not there": (["--device", "cuda"], "cuda"),
    "impossible width": (["--dim", "1000000000"], "these sizes need at least"),
    "impossible batch": (["--batch", "1000000000"], "these sizes need at least"),
    "impossible number": (["--layers", "9" * 30], "--layers must be at most 2147483647"),
    "data that never ends": (["--data", "/dev/zero"], "--data /dev/zero: neither a file nor a folder"),
    "no data name": (["--data", ""], "--data is empty: give a path, or leave it out"),
    "no out name": (["--out", ""], "--out is empty: give a path, or leave it out"),
    "out that holds a file for a folder": (["--out", "{tmp}/taken"], "taken/checkpoints: cannot be made"),
}


@pytest.mark.once
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_in_a_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "device that is not there" and "cuda" in BACKENDS:
        return  # here it is
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "binary").write_bytes(b"abc\0" * 100)
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "taken").mkdir()
    (tmp_path / "old" / "checkpoints" / "000001").mkdir(parents=True)
    (tmp_path / "taken" / "checkpoints").write_text("a file")
    given, message = BAD[name]
    arguments = [*SMALL, "--nproc", "2", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert main([*arguments, *(word.replace("{tmp}", str(tmp_path)) for word in given)]) == 2
    assert (tmp_path / "old" / "checkpoints" / "000001").exists()
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("hyper-parallel train: ")
    assert message in line


@pytest.mark.once
def test_a_checkpoint_of_another_model_is_not_resumed(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_warm(programs, "torch", "--nproc", "1", "--steps", "1", "--out", tmp_path)
    arguments = [*SMALL, "--nproc", "1", "--device", "cpu", "--out", str(tmp_path), "--resume"]
    assert main([*arguments, "--steps", "1"]) == 2
    assert "has 1 steps already; ask for more with --steps" in capsys.readouterr().err
    for other in (["--layers", "1"], ["--optimizer", "muon"]):
        assert main([*arguments, *other]) == 2
        told = capsys.readouterr().err
        assert "is of another model" in told and "give the same sizes, --dtype and --optimizer" in told


@pytest.mark.once
def test_runs_without_a_folder_lie_beside_each_other_and_one_with_overwrite_takes_the_place(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "train").mkdir(parents=True)
    mine = tmp_path / "out" / "train" / "notes.txt"
    mine.write_text("of the user")
    base = ["--nproc", "1", "--save-every", "1"]
    first = train_warm(programs, "torch", *base, "--steps", "2")
    assert "results in out/train:" in first
    assert "another run" not in first
    second = train_warm(programs, "torch", *base, "--steps", "1", "--seed", "1")
    assert "out/train holds another run: this one is in out/train-2" in second
    assert "results in out/train-2:" in second
    resumed = train_warm(programs, "torch", *base, "--steps", "3", "--resume")
    assert "going on with the last run, in out/train-2" in resumed
    assert (step_of(tmp_path / "out" / "train"), step_of(tmp_path / "out" / "train-2")) == (2, 3)
    train_warm(programs, "torch", *base, "--steps", "1", "--overwrite")
    out = tmp_path / "out" / "train"
    assert (step_of(out), len(rows(out))) == (1, 1)
    assert [path.name for path in sorted((out / "checkpoints").iterdir())] == ["000001", "latest"]
    assert mine.read_text() == "of the user"


@pytest.mark.once
def test_the_platform_that_was_asked_for_runs_or_none(tmp_path: Path) -> None:
    """Nothing that is imported before the options are read may decide the framework."""
    script = (
        "import sys; from hyper_parallel.trainer import command; "
        "print(sorted({'torch', 'mindspore'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    unknown = {**os.environ, "HYPER_PARALLEL_PLATFORM": "jax"}
    refused = subprocess.run(
        command("--out", tmp_path), capture_output=True, text=True, timeout=60, env=unknown
    )
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert "HYPER_PARALLEL_PLATFORM='jax' names no platform" in line


@pytest.mark.once
def test_another_platform_than_the_process_has_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "torch")
    assert main(["--platform", "torch", "--steps", "0"]) == 2
    assert main(["--platform", "mindspore", "--out", str(tmp_path)]) == 2
    assert "--platform mindspore: this process uses torch already" in capsys.readouterr().err


@pytest.mark.once
def test_debug_shows_the_traceback_and_help_the_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--steps", "0", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for option in (
        "--platform",
        "--device",
        "--nproc",
        "--data",
        "--steps",
        "--dtype",
        "--optimizer",
        "--verify",
        "--resume",
        "--debug",
    ):
        assert option in shown
