"""The checks on a small repository: which files they look at, what they print, and that exemptions do not outlive their cause."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lint import arrows, helper_names, lazy_names, shared_code, top_level
from lint.__main__ import main

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, content: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        return path

    return write


@pytest.mark.parametrize(
    ("file", "refused"),
    [
        ("packages/hp-fsdp/src/hp_fsdp/state.py", ["device-module", "in-place-method", "framework-branch"]),
        ("packages/hp-platform/src/hp_platform/mesh.py", ["device-module", "in-place-method"]),
        ("packages/hp-dtensor/src/hp_dtensor/_torch.py", ["device-module"]),
        ("packages/hp-dtensor/src/hp_dtensor/_mindspore.py", ["device-module"]),
        ("packages/hp-dtensor/src/hp_dtensor/_torch/answers.py", ["device-module"]),
        ("packages/hp-platform/src/hp_platform/torch/tensor.py", []),
        ("packages/hp-platform/src/hp_platform/mindspore/tensor.py", []),
        ("packages/hp-platform/src/hp_platform/testing/pool.py", []),
        ("packages/hp-fsdp/tests/test_state.py", []),
    ],
)
def test_shared_code_is_what_exists_once_for_all_frameworks(
    tmp_path: Path, write: Write, file: str, refused: list[str]
) -> None:
    write(file, "torch.cuda.empty_cache()\nx.add_(y)\nflag = device_type == 'npu'\n")
    assert [violation.rule for violation in shared_code.check(tmp_path)] == refused


def test_an_exemption_with_a_reason_is_honoured(tmp_path: Path, write: Write) -> None:
    write(
        "packages/hp-fsdp/src/hp_fsdp/a.py",
        "xs.append_(y)  # lint: allow in-place-method: a list of ours, no tensor\n",
    )
    assert list(shared_code.check(tmp_path)) == []


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("x = y  # lint: allow in-place-method: was needed once", "nothing here is refused"),
        ("x.add_(y)  # lint: allow in-place-method", "without a reason"),
        ("x.add_(y)  # lint: allow everything: please", "allows everything"),
        ("x += y  # lint: allow in-place-method: the wrong rule", "nothing here is refused"),
    ],
)
def test_a_bad_exemption_is_refused(tmp_path: Path, write: Write, line: str, what: str) -> None:
    write("packages/hp-fsdp/src/hp_fsdp/a.py", line + "\n")
    about = [violation for violation in shared_code.check(tmp_path) if violation.rule == "exemption"]
    assert len(about) == 1
    assert what in about[0].what


@pytest.mark.parametrize(
    ("statement", "refused"),
    [
        ("import hp_fsdp", True),
        ("from hp_fsdp import fully_shard", True),
        ("from hp_fsdp.state import State", True),
        ("hp_fsdp = pytest.importorskip('hp_fsdp')", True),
        ("import hp_tp", False),
        ("from hp_platform.mesh import DeviceMesh", False),
        ("from hp_dtensor.testing import check", True),
        ("import numpy", False),
    ],
)
def test_a_packages_tests_follow_its_arrows(
    tmp_path: Path, write: Write, statement: str, refused: bool
) -> None:
    write(
        "packages/hp-tp/pyproject.toml",
        '[project]\nname = "hp-tp"\ndependencies = ["hp-platform>=0.1,<0.2"]\n',
    )
    for other in ("hp-platform", "hp-dtensor", "hp-fsdp"):
        write(f"packages/{other}/pyproject.toml", f'[project]\nname = "{other}"\n')
    write("packages/hp-tp/tests/test_it.py", statement + "\n")
    assert [violation.rule for violation in arrows.check(tmp_path)] == ["test-arrows"] * refused


def test_the_test_harness_is_open_to_every_package(tmp_path: Path, write: Write) -> None:
    for name in ("hp-platform", "hp-alone"):
        write(f"packages/{name}/pyproject.toml", f'[project]\nname = "{name}"\n')
    write(
        "packages/hp-alone/tests/test_it.py",
        "from hp_platform.testing import distributed\nfrom hp_platform import testing\nfrom hp_platform import get_platform\n",
    )
    assert [violation.line for violation in arrows.check(tmp_path)] == [3]


def test_the_top_level_is_exact(tmp_path: Path) -> None:
    for name in top_level.ALLOWED - {"SECURITY.md"} | {"scripts", ".ci", "out"}:
        (tmp_path / name).touch()
    assert {(v.path.name, v.what) for v in top_level.check(tmp_path)} == {
        ("scripts", "is not an entry of the top level"),
        ("SECURITY.md", "is missing from the top level"),
    }


def test_the_command_prints_place_reason_and_way_out(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in top_level.ALLOWED:
        (tmp_path / name).mkdir()
    assert main(tmp_path) == 0
    write("packages/hp-fsdp/src/hp_fsdp/a.py", "x = 1\nx += y\n")
    assert main(tmp_path) == 1
    output = capsys.readouterr().out
    assert "packages/hp-fsdp/src/hp_fsdp/a.py:2: [augmented-assignment] x += y is in place" in output
    assert "    why: MindSpore on CPU" in output
    assert "    instead: x = x + y, or platform.add_" in output


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("show.py", ["lazy-name"]),
        ("show/__init__.py", ["lazy-name"]),
        ("shown.py", []),
        ("random.py", []),
        ("picture/show.py", []),
    ],
)
def test_a_module_does_not_hide_a_name_that_its_package_exports_lazily(
    tmp_path: Path, write: Write, file: str, found: list[str]
) -> None:
    package = "packages/hp-dtensor/src/hp_dtensor"
    table = '_WHERE = {"show": "picture", "random": "."}'
    write(f"{package}/__init__.py", f"{table}\n__getattr__, __dir__, __all__ = attach(__name__, _WHERE)\n")
    write(f"{package}/{file}", "")
    assert [violation.rule for violation in lazy_names.check(tmp_path)] == found


def test_helpers_of_tests_have_names_of_their_own(tmp_path: Path, write: Write) -> None:
    for file in (
        "packages/hp-fsdp/tests/calls.py",
        "packages/hp-tp/tests/calls.py",
        "packages/hp-tp/tests/random/calls_of_random.py",
        "packages/hp-fsdp/tests/test_parity.py",
        "packages/hp-tp/tests/test_parity.py",
        "packages/hp-fsdp/tests/torch_only/conftest.py",
        "packages/hp-tp/tests/torch_only/conftest.py",
        "packages/hp-tp/src/hp_tp/calls.py",
        "integration_tests/queue.py",
        "tools/npu_emulator/tests/calls.py",
    ):
        write(file, "")
    assert [(str(v.path.relative_to(tmp_path)), v.rule, v.what) for v in helper_names.check(tmp_path)] == [
        (
            "packages/hp-tp/tests/calls.py",
            "helper-name",
            "the name 'calls' is that of packages/hp-fsdp/tests/calls.py too",
        ),
        (
            "integration_tests/queue.py",
            "helper-name",
            "the name 'queue' is that of a module of Python's own",
        ),
        (
            "tools/npu_emulator/tests/calls.py",
            "helper-name",
            "the name 'calls' is that of packages/hp-fsdp/tests/calls.py too",
        ),
    ]
