"""spawn: results by rank, the first cause as the error, and nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest

from hp_platform.launch import WorkerError, WorkerTimeoutError, environment, spawn

sys.path.insert(0, str(Path(__file__).parent))
from processes import assert_gone, note_pid, noted_pids

pytestmark = pytest.mark.once

OFFSET = 100


def rank() -> int:
    place = environment()
    assert place is not None
    return place.rank


def rank_plus_offset(extra: int = 0) -> int:
    return rank() + OFFSET + extra


def test_results_come_in_the_order_of_ranks() -> None:
    def last_first() -> int:
        time.sleep(0.2 * (2 - rank()))
        return rank()

    assert spawn(last_first, 3) == [0, 1, 2]


def test_lambdas_partials_and_functions_of_unimportable_modules_travel() -> None:
    factor = 3
    assert spawn(lambda x: factor * x, 1, args=(5,)) == [15]
    assert spawn(rank_plus_offset, 2, kwargs={"extra": 7}) == [107, 108]
    assert spawn(partial(rank_plus_offset, 1), 1) == [101]


def test_large_arguments_and_results_travel() -> None:
    assert [len(x) for x in spawn(lambda x: x + x, 2, args=(b"x" * 5_000_000,))] == [10_000_000] * 2


@pytest.mark.parametrize("how", ["file", "command"])
def test_functions_of_a_script_travel_and_its_main_module_does_not_run_again(
    tmp_path: Path, how: str
) -> None:
    script = textwrap.dedent(
        """
        import os
        from hp_platform.launch import environment, spawn
        BASE = 10
        class Answer:
            def __init__(self, value):
                self.value = value
        def work():
            return Answer(BASE + environment().rank)
        print("main module", [x.value for x in spawn(work, 2)])
        """
    )
    file = tmp_path / "script.py"
    file.write_text(script)
    command = [sys.executable, str(file)] if how == "file" else [sys.executable, "-c", script]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("main module [10, 11]\n", "")


def test_workers_get_a_jobs_variables_and_none_of_an_outer_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK_ID": "7",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": "3",
        "WORLD_SIZE": "4",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    first, second = spawn(lambda: dict(os.environ), 2, env={"EXTRA": "1"})
    assert (first["RANK"], second["RANK"], first["WORLD_SIZE"], second["LOCAL_RANK"]) == ("0", "1", "2", "1")
    assert (first["MASTER_ADDR"], first["MASTER_PORT"]) == ("127.0.0.1", second["MASTER_PORT"])
    assert (first["OMP_NUM_THREADS"], first["EXTRA"]) == ("1", "1")
    assert not {"RANK_ID", "TORCHELASTIC_USE_AGENT_STORE"} & set(first)


def test_the_first_failing_ranks_traceback_is_raised_and_the_others_are_gone(tmp_path: Path) -> None:
    def fail() -> None:
        note_pid(tmp_path, rank())
        if rank() == 1:
            noted_pids(tmp_path, 3)
            (tmp_path / "failed").write_text(str(time.monotonic()))
            raise ValueError("no such layer")
        time.sleep(100)

    with pytest.raises(WorkerError) as error:
        spawn(fail, 3)
    # The clock is the host's, the same for all processes.
    assert time.monotonic() - float((tmp_path / "failed").read_text()) < 5
    assert_gone(noted_pids(tmp_path, 3), 0)
    assert error.value.rank == 1
    assert 'raise ValueError("no such layer")' in error.value.traceback
    assert str(error.value).startswith("rank 1 of 3 failed with ValueError: no such layer\n\nTraceback")
    assert "rank 0 was still running and was stopped" in str(error.value)


def test_a_lost_connection_does_not_hide_the_failure_that_caused_it() -> None:
    def fail() -> None:
        if rank() == 0:
            raise ConnectionError("peer is gone")
        time.sleep(0.7)
        raise ValueError("the cause")

    with pytest.raises(WorkerError) as error:
        spawn(fail, 2)
    assert str(error.value).startswith("rank 1 of 2 failed with ValueError: the cause")
    assert "  rank 0 failed with ConnectionError: peer is gone" in str(error.value)


def test_an_error_raised_from_a_lost_connection_counts_as_one() -> None:
    def fail() -> None:
        if rank() == 0:
            try:
                raise TimeoutError
            except TimeoutError as error:
                raise RuntimeError("all_reduce was not joined") from error
        time.sleep(0.7)
        raise ValueError("the cause")

    with pytest.raises(WorkerError, match="rank 1 of 2 failed with ValueError: the cause"):
        spawn(fail, 2)


def test_lost_connections_alone_are_reported_the_earliest_first() -> None:
    def fail() -> None:
        time.sleep(0.5 * (1 - rank()))
        raise ConnectionError(f"rank {rank()} lost its peer")

    with pytest.raises(WorkerError, match="rank 1 of 2 failed with ConnectionError: rank 1 lost its peer"):
        spawn(fail, 2)


def test_a_killed_worker_is_named_with_its_signal(tmp_path: Path) -> None:
    def die() -> None:
        note_pid(tmp_path, rank())
        if rank() == 2:
            noted_pids(tmp_path, 3)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)

    with pytest.raises(WorkerError, match=r"rank 2 of 3 was killed by signal 9 \(SIGKILL\)"):
        spawn(die, 3)
    assert_gone(noted_pids(tmp_path, 3), 0)


def test_a_crash_shows_the_python_stack() -> None:
    with pytest.raises(WorkerError, match=r"rank 0 of 1 was killed by signal 11 \(SIGSEGV\)") as error:
        spawn(lambda: __import__("faulthandler")._sigsegv(), 1)
    assert "in <lambda>" in error.value.traceback


def test_a_worker_that_leaves_by_itself_is_a_failure() -> None:
    with pytest.raises(WorkerError, match="rank 0 of 1 exited with code 3 before it had returned"):
        spawn(lambda: os._exit(3), 1)
    with pytest.raises(WorkerError, match="rank 0 of 1 failed with SystemExit: 4"):
        spawn(lambda: sys.exit(4), 1)


def test_a_result_that_cannot_travel_is_a_failure_of_its_rank() -> None:
    with pytest.raises(WorkerError, match="rank 0 of 1 failed with TypeError: cannot pickle"):
        spawn(lambda: __import__("threading").Lock(), 1)


def test_a_hang_ends_at_the_time_limit_with_stacks(tmp_path: Path) -> None:
    def waits_for_ever() -> None:
        note_pid(tmp_path, rank())
        if rank() == 1:
            noted_pids(tmp_path, 2)
            time.sleep(100)

    started = time.monotonic()
    with pytest.raises(WorkerTimeoutError) as error:
        spawn(waits_for_ever, 2, timeout=2.0)
    assert time.monotonic() - started < 30
    assert_gone(noted_pids(tmp_path, 2), 0)
    assert isinstance(error.value, TimeoutError)
    assert str(error.value).startswith("rank 1 of 2 did not finish within 2 s\n\nrank 1:\n")
    assert "in waits_for_ever" in error.value.traceback
    assert "  rank 0 had returned" in str(error.value)


def test_a_process_that_does_not_come_up_ends_at_start_grace(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(100)\n")
    with pytest.raises(WorkerTimeoutError, match=r"ranks 0, 1 of 2 did not start within 0\.5 s"):
        spawn(rank, 2, env={"PYTHONPATH": str(tmp_path)}, start_grace=0.5)


def test_children_of_workers_end_too(tmp_path: Path) -> None:
    def with_child() -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        note_pid(tmp_path, "child", child.pid)
        raise ValueError("leaves a child behind")

    with pytest.raises(WorkerError, match="leaves a child behind"):
        spawn(with_child, 1)
    assert_gone(noted_pids(tmp_path, 1), 5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    # Shells let what they start in the background ignore the interrupt, and it is inherited.
    script = f"""
import os, signal, time
from pathlib import Path
from hp_platform.launch import environment, spawn
signal.signal(signal.SIGINT, signal.default_int_handler)
def work():
    (Path({str(tmp_path)!r}) / f"{{environment().rank}}.pid").write_text(str(os.getpid()))
    time.sleep(100)
spawn(work, 2)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", script], env=env, stderr=subprocess.PIPE, text=True)
    workers = noted_pids(tmp_path, 2)
    parent.send_signal(number)
    _, errors = parent.communicate(timeout=10)
    assert_gone(workers, 5)
    assert ("KeyboardInterrupt" in errors) == (number is signal.SIGINT)


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (
            lambda: spawn(rank, 0),
            ValueError,
            "num_processes=0: give the number of processes to start, 1 or more",
        ),
        (lambda: spawn(rank, "2"), ValueError, "num_processes='2'"),
        (lambda: spawn(rank, True), ValueError, "num_processes=True"),
        (lambda: spawn("rank", 1), TypeError, "spawn runs a function; it got 'rank', which cannot be called"),
        (
            lambda: spawn(rank, 2, ["a", 1]),
            TypeError,
            "device=['a', 1]: give the kind of device by its name, such as 'cpu'; what fn is called with goes into args= and",
        ),
    ],
)
def test_wrong_calls_are_refused(wrong, kind, message) -> None:
    with pytest.raises(kind) as error:
        wrong()
    assert message in str(error.value)
