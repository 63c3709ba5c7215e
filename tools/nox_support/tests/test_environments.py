"""Which release of a requirement an environment gets, with pip itself and an index of four empty wheels."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nox_support import environments


class Here(environments.Environment):
    """An environment in the folder that stands as its name."""

    @property
    def path(self) -> Path:
        return Path(self.name)


class Session:
    """What making an environment uses of a nox session."""

    def __init__(self) -> None:
        self.logged: list[str] = []

    def log(self, message: str) -> None:
        self.logged.append(message)

    def run(self, *command: str, external: bool, silent: bool) -> None:
        subprocess.run(command, check=True, capture_output=True)


def write_wheel(folder: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder


@pytest.fixture
def session(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    for name, version in (("both", "1.0"), ("both", "1.0+cpu"), ("both", "1.1"), ("plain", "1.0")):
        write_wheel(tmp_path, name, version)
    for variable, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(tmp_path)), ("CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(f"PIP_{variable}", value)
    monkeypatch.setattr(environments, "BUILD", ())
    return Session()


def installed(environment: environments.Environment, name: str) -> str:
    program = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
    command = [environment.python, "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_preferred_release_is_taken_and_stays_when_the_requirements_are_installed_once_more(
    folder: Path, session: Session
) -> None:
    environment = Here(str(folder), ("both==1.0",), preferred=("both==1.0+cpu",))
    environments._install_requirements(session, environment)
    assert installed(environment, "both") == "1.0+cpu"
    environments._pip_install(session, environment, *environment.requirements)
    assert installed(environment, "both") == "1.0+cpu"
    assert session.logged == []


def test_without_the_preferred_release_the_requirement_is_taken_and_the_hint_is_logged(
    folder: Path, session: Session
) -> None:
    environment = Here(
        str(folder), ("plain==1.0",), preferred=("plain==1.0+cpu",), where_else="look at the other index"
    )
    environments._install_requirements(session, environment)
    assert installed(environment, "plain") == "1.0"
    (line,) = session.logged
    assert "plain==1.0+cpu" in line
    assert "look at the other index" in line


def test_a_requirement_that_pip_does_not_find_fails(folder: Path, session: Session) -> None:
    environment = Here(str(folder), ("plain==2.0",), preferred=("plain==2.0+cpu",))
    with pytest.raises(subprocess.CalledProcessError):
        environments._install_requirements(session, environment)
