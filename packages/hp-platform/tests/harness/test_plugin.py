"""The plugin tested on itself: pytest runs inside of pytest, on pools without a framework."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from inner_tests import pids
from processes import assert_gone

pytestmark = pytest.mark.once

pytest_plugins = ("pytester",)


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
