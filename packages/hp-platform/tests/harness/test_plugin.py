"""The plugin tested on itself: pytest runs inside of pytest, on pools without a framework."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hp_platform.testing import backends

sys.path.insert(0, str(Path(__file__).parent))
from processes import assert_gone

pytestmark = pytest.mark.once

pytest_plugins = ("pytester",)

HEAD = """
import os, sys, time, signal, threading, warnings
from pathlib import Path
import pytest
from hp_platform.testing import World, distributed
def note(name, world):
    Path(f"{name}.{world.rank}").write_text(str(os.getpid()))
"""
NEXT = """
@distributed(2, backends="plain")
def test_zz_next_test_runs_on_a_fresh_pool(world):
    note("next", world)
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pytest.RunResult]:
    """Run pytest on a file with the given text."""
    # Backends whose presence can be told without starting a process.
    monkeypatch.setenv("HP_TEST_BACKENDS", "torch,mindspore")
    monkeypatch.delenv("HP_REQUIRE_BACKENDS", raising=False)
    monkeypatch.delenv("HP_TEST_TIMEOUT_SCALE", raising=False)
    monkeypatch.delenv("HP_TEST_DEVICES", raising=False)  # of the run that this test is in
    pytester.makeini(
        "[pytest]\naddopts = -p hp_platform.testing.plugin --import-mode=importlib -p no:cacheprovider\nfilterwarnings = error\n"
    )

    def run_text(text: str = "", *options: str, then: str = "") -> pytest.RunResult:
        if text:
            pytester.makepyfile(test_inner=HEAD + textwrap.dedent(text) + then)
        return pytester.runpytest_inprocess(*options)

    return run_text


def pids(pytester: pytest.Pytester, name: str) -> list[int]:
    return [int(file.read_text()) for file in sorted(pytester.path.glob(f"{name}.*"))]


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

        @distributed(2, backends="plain", timeout=1)
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
            "rank 1 of 2 did not finish within 1 s",
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


def test_workers_start_once_and_serve_all_tests_of_their_size(run, pytester) -> None:
    result = run(
        """
        @distributed((1, 2), backends="plain")
        def test_a(world):
            note(f"a{world.size}", world)

        @distributed((2, 1), backends="plain")
        @pytest.mark.parametrize("letter", ["x", "y"])
        def test_b(world, letter):
            note(f"b{world.size}{letter}", world)
        """,
        "-v",
    )
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(
        [
            "*::test_a[[]plain-w1] PASSED*",
            "*::test_b[[]plain-w1-x] PASSED*",
            "*::test_b[[]plain-w1-y] PASSED*",
            "*::test_a[[]plain-w2] PASSED*",
            "*::test_b[[]plain-w2-x] PASSED*",
            "*::test_b[[]plain-w2-y] PASSED*",
        ]
    )
    for size in (1, 2):
        assert pids(pytester, f"a{size}") == pids(pytester, f"b{size}x") == pids(pytester, f"b{size}y")
        assert len(pids(pytester, f"a{size}")) == size
        assert_gone(pids(pytester, f"a{size}"), 5)  # the inner session has ended


def test_the_workers_have_left_when_the_session_is_over(run, pytester) -> None:
    # pytest-xdist ends its processes from there on.
    pytester.makeconftest(
        """
        import os
        from pathlib import Path
        import pytest

        def is_alive(pid):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return False
            return True

        @pytest.hookimpl(trylast=True)
        def pytest_sessionfinish():
            pids = [int(file.read_text()) for file in Path().glob("started.*")]
            Path("alive").write_text(f"{sum(map(is_alive, pids))} of {len(pids)}")
        """
    )
    run(
        """
        @distributed(2, backends="plain")
        def test_starts(world):
            note("started", world)
        """
    ).assert_outcomes(passed=1)
    assert (pytester.path / "alive").read_text() == "0 of 2"


def test_parameters_fixtures_classes_skips_and_expected_failures_work_as_in_any_test(run) -> None:
    result = run(
        """
        class Config:
            def __init__(self, width):
                self.width = width

        @pytest.fixture
        def config():
            return Config(3)

        @distributed(2, backends="plain")
        def test_fixture(world: World, config, tmp_path):
            assert (config.width, type(config) is Config, tmp_path.is_dir()) == (3, True, True)
            assert (world.backend, world.device, world.platform, world.group) == ("plain", "cpu", None, None)

        class TestGroup:
            @distributed(2, backends="plain")
            @pytest.mark.parametrize("square", [lambda x: x * x])
            def test_method(self, square):
                assert square(3) == 9 and type(self).__name__ == "TestGroup"

        @distributed(2, backends="plain")
        def test_skips():
            pytest.skip("not today")

        @distributed(2, backends="plain")
        def test_expected():
            pytest.xfail("known")

        @distributed(2, backends="plain")
        @pytest.mark.xfail(strict=True)
        def test_expected_by_mark():
            raise ValueError

        @distributed(2, backends="plain")
        def test_in_disagreement(world):
            if world.rank == 1:
                pytest.skip("only me")
        """,
        "-rs",
    )
    result.assert_outcomes(passed=2, skipped=1, xfailed=2, failed=1)
    result.stdout.fnmatch_lines(["SKIPPED [[]1] test_inner.py:*: not today"])
    result.stdout.fnmatch_lines(
        [
            "the ranks do not agree how the test ends: rank 0 passed, rank 1 skipped (only me); all must take the same decision"
        ]
    )


def test_hypothesis_draws_the_same_examples_on_all_ranks(run, pytester) -> None:
    run(
        """
        from hypothesis import given, settings, strategies as st

        @distributed(2, backends="plain")
        @settings(derandomize=True, database=None, max_examples=5, deadline=None)
        @given(x=st.integers())
        def test_draws(x, world):
            with Path(f"drawn.{world.rank}").open("a") as file:
                file.write(f"{x}\\n")
        """
    ).assert_outcomes(passed=1)
    drawn = [file.read_text() for file in sorted(pytester.path.glob("drawn.*"))]
    assert len(drawn) == 2
    assert drawn[0] == drawn[1] != ""


def test_isolated_tests_have_workers_of_their_own(run, pytester) -> None:
    run(
        """
        @distributed(2, backends="plain")
        def test_a(world):
            note("a", world)

        @distributed(2, backends="plain", isolated=True)
        def test_b(world):
            note("b", world)

        @distributed(2, backends="plain")
        def test_c(world):
            note("c", world)
        """
    ).assert_outcomes(passed=3)
    assert pids(pytester, "a") == pids(pytester, "c")
    assert not set(pids(pytester, "a")) & set(pids(pytester, "b"))


def test_files_of_the_same_name_and_helpers_on_the_python_path_are_found(run, pytester) -> None:
    pytester.path.joinpath("pytest.ini").write_text(
        pytester.path.joinpath("tox.ini").read_text() + "\npythonpath = helpers\n"
    )
    for folder, value in (("one", 1), ("two", 2)):
        pytester.mkdir(folder).joinpath("test_same.py").write_text(
            "from hp_platform.testing import distributed\n"
            "from the_helper import ANSWER\n"
            f"VALUE = {value}\n"
            "@distributed(1, backends='plain')\n"
            f"def test_value():\n    assert (VALUE, ANSWER) == ({value}, 42)\n"
        )
    pytester.mkdir("helpers").joinpath("the_helper.py").write_text("ANSWER = 42\n")
    run().assert_outcomes(passed=2)


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


def test_world_without_the_decorator_is_refused(run) -> None:
    result = run("def test_x(world): pass\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*the fixture `world` belongs to tests that are marked with @distributed(...)"]
    )


def test_the_harness_imports_no_framework() -> None:
    script = (
        "import sys, hp_platform.testing.plugin, hp_platform.launch, hp_platform.testing.parity, hp_platform.testing.counting\n"
        "print(sorted({'torch', 'torch_npu', 'mindspore', 'numpy'} & set(sys.modules)))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
