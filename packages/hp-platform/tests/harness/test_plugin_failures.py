"""Ranks that fail, hang, die, warn: what the run shows. On pools without a framework."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from inner_tests import pids
from processes import assert_gone

pytestmark = pytest.mark.once

pytest_plugins = ("pytester",)

NEXT = """
@distributed(2, backends="plain")
def test_zz_next_test_runs_on_a_fresh_pool(world):
    note("next", world)
"""


def test_a_failing_rank_is_the_error_and_the_next_test_runs(run, pytester) -> None:
    started = time.monotonic()
    result = run(
        """
        @distributed(3, backends="plain")
        def test_fails(world):
            note("first", world)
            while len(list(Path().glob("first.*"))) < 3:
                time.sleep(0.01)
            if world.rank == 1:
                assert world.size + 1 == 5
            time.sleep(100)
        """,
        then=NEXT,
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*_ test_fails[[]plain-w3] _*",
            "rank 1 of 3 failed with AssertionError: assert (3 + 1) == 5",
            "*test_inner.py*in test_fails*",
            "*assert world.size + 1 == 5*",
            " +  where 3 = World(*",
            "other ranks:",
            "  rank 0 was still running and was stopped",
            "  rank 2 was still running and was stopped",
        ]
    )
    result.stdout.no_fnmatch_line("*_remote.py*")
    assert time.monotonic() - started < 30
    first = pids(pytester, "first")
    assert len(first) == 3
    assert_gone(first, 5)
    assert not set(first) & set(pids(pytester, "next"))


def test_a_hanging_rank_is_named_with_its_stack_and_the_next_test_runs(run, pytester) -> None:
    result = run(
        """
        def waits_for_ever():
            time.sleep(100)

        @distributed(2, backends="plain", timeout=3)
        def test_hangs(world):
            note("first", world)
            if world.rank == 1:
                waits_for_ever()
        """,
        then=NEXT,
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "rank 1 of 2 did not finish within 3 s",
            "rank 1:",
            "*in waits_for_ever",
            "*in test_hangs",
            "  rank 0 had returned",
        ]
    )
    assert_gone(pids(pytester, "first"), 5)


def test_a_killed_rank_is_named_with_its_signal_and_the_next_test_runs(run, pytester) -> None:
    result = run(
        """
        @distributed(2, backends="plain")
        def test_dies(world):
            note("first", world)
            while not Path("first.1").exists():
                time.sleep(0.01)
            if world.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(100)
        """,
        then=NEXT,
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["rank 0 of 2 was killed by signal 9 (SIGKILL)", "  rank 1 was still running and was stopped"]
    )
    assert_gone(pids(pytester, "first"), 5)


def test_output_of_workers_is_shown_on_failure_only(run) -> None:
    result = run(
        """
        @distributed(2, backends="plain")
        def test_a_passes(world):
            print("silent words")

        @distributed(2, backends="plain")
        def test_b_fails(world):
            print("words of", world.rank)
            os.write(2, b"below python\\n")
            if world.rank == 1:
                raise ValueError
        """
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*Captured rank 0 output*", "words of 0", "below python", "*Captured rank 1 output*", "words of 1"]
    )
    result.stdout.no_fnmatch_line("*silent words*")


def test_warnings_in_workers_are_errors_unless_the_configuration_exempts_them(run, pytester) -> None:
    result = run(
        """
        @distributed(2, backends="plain")
        def test_warns(world):
            warnings.warn("old thing", DeprecationWarning)

        @distributed(2, backends="plain")
        @pytest.mark.filterwarnings("ignore:old .*:DeprecationWarning")
        def test_is_exempt(world):
            warnings.warn("old thing", DeprecationWarning)
        """
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["rank * of 2 failed with DeprecationWarning: old thing"])
    run("", "-W", "ignore:old thing:DeprecationWarning").assert_outcomes(passed=2)


def test_exceptions_that_nothing_catches_are_errors(run) -> None:
    result = run(
        """
        def fail():
            raise ValueError("in the background")

        @distributed(1, backends="plain")
        def test_thread(world):
            thread = threading.Thread(target=fail)
            thread.start()
            thread.join()

        class Loud:
            def __del__(self):
                raise ValueError("while dying")

        @distributed(1, backends="plain")
        def test_finalizer(world):
            Loud()
        """
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        ["*1 exception(s) in background threads or finalizers*ValueError('in the background')"]
    )
    result.stdout.fnmatch_lines(
        ["*1 exception(s) in background threads or finalizers*ValueError('while dying')"]
    )


def test_what_cannot_be_sent_is_refused_by_name(run) -> None:
    result = run(
        """
        @distributed(1, backends="plain")
        @pytest.mark.parametrize("lock", [threading.Lock()], ids=["lock"])
        def test_lock(lock):
            pass
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*the arguments lock cannot be sent to the workers (TypeError: cannot pickle*"]
    )


def test_a_module_that_fails_in_workers_shows_its_traceback(run) -> None:
    result = run(
        """
        if "RANK" in os.environ:
            raise ValueError("not in a worker")

        @distributed(1, backends="plain")
        def test_x():
            pass
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["rank 0 of 1 failed with ValueError: not in a worker", "*test_inner.py*in <module>*"]
    )
