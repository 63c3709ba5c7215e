"""One environment per backend, made once and shared by all sessions of that backend.

An environment is made in two steps, each with its own stamp. The base is the framework or the tools: minutes, and it is
thrown away and made anew when its requirements or the interpreter change, so that nothing of the old ones stays. The
packages of this repository are installed editable on top: seconds, and only when their metadata changes.

[Note: why torch is pinned] torch_npu 2.13.0 pairs with torch 2.13 only, and an unpinned torch is the newest one.

[Note: which build of torch] An NPU needs the CPU build of torch, so npu prefers it, by name. On Linux the 2.13.0 of PyPI is
built for CUDA, beside which torch_npu ends the process when it loads. Where pip finds no other, npu takes that one, and
the emulator lets the two load together (npu_emulator/_beside_cuda.py): the same tests, some GB more on the disk.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import nox

from nox_support.house import PACKAGES, ROOT

TORCH = "torch==2.13.0"  # [Note: why torch is pinned]
TORCH_FOR_CPU = "torch==2.13.0+cpu"  # [Note: which build of torch]
# hatchling builds our packages inside the environment: nine isolated builds would take a minute.
BUILD = ("hatchling>=1.26", "editables>=0.5")
RUNNER = ("pytest-xdist>=3.6",)
# Models that hp-tp's tests run under its plans; configurations of a few numbers, nothing is loaded. 5.20 is the last that
# Python 3.10 gets.
MODELS = ("transformers>=5.20,<6",)


@dataclass(frozen=True)
class Environment:
    """What one shared environment holds, and the variables its processes get.

    `preferred` narrows the requirements where pip finds such releases, and `where_else` is the hint for a user whose pip
    does not. `prepare` is a command for the interpreter, run before each use; it does nothing when there is nothing to do.
    """

    name: str
    requirements: tuple[str, ...]
    requirements_without_dependencies: tuple[str, ...] = ()
    preferred: tuple[str, ...] = ()
    where_else: str = ""
    local_tools: tuple[str, ...] = ()
    prepare: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The folder of the environment."""
        return ROOT / ".nox" / f"env-{self.name}"

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.path / "bin" / "python")


def _cpp_compiler() -> tuple[str, ...]:
    """What brings a C++ compiler where the machine has none."""
    has_one = "CXX" in os.environ or any(map(shutil.which, ("g++", "c++", "clang++")))
    return () if has_one else ("ziglang>=0.13,<0.18",)


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("torch", (TORCH, "numpy", *MODELS, *RUNNER)),
        Environment(
            "npu",
            (TORCH, "numpy", "pyyaml", *RUNNER, *_cpp_compiler()),
            preferred=(TORCH_FOR_CPU,),
            where_else="the index of CPU builds that pytorch.org names, in PIP_EXTRA_INDEX_URL, saves some GB",
            # torch is already there, and pip shall not have a second opinion about it.
            requirements_without_dependencies=("torch-npu==2.13.0",),
            local_tools=("tools/npu_emulator",),
            prepare=("-m", "npu_emulator.build"),
            # Without CANN torch_npu does not import, so torch must not load it by itself; the emulator does.
            variables={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "NPU_EMULATOR": "1"},
        ),
        # MindSpore 2.10 is compiled against NumPy 1.x: with NumPy 2 its first operation raises SystemError.
        Environment("mindspore", ("mindspore==2.10.0", "numpy<2", *RUNNER)),
        Environment(
            "tools",
            (
                "import-linter>=2.3,<3",
                "mkdocs>=1.6,<2",
                "mkdocs-material>=9.6,<10",
                "mypy>=1.15,<3",
                "nox>=2025.2",
                "packaging>=24",
                "ruff==0.17.6",  # another release formats differently
                "tomli>=2",  # Python 3.10 has no tomllib
            ),
        ),
    )
}


def ensure(session: nox.Session, name: str) -> Environment:
    """Make the environment `name` if it is missing or out of date, and return it."""
    environment = ENVIRONMENTS[name]
    base, packages = _stamps(environment)
    base_stamp, packages_stamp = environment.path / "base.stamp", environment.path / "packages.stamp"

    if _read(base_stamp) != base:
        session.log(f"making {environment.path.relative_to(ROOT)} with {', '.join(environment.requirements)}")
        shutil.rmtree(environment.path, ignore_errors=True)
        session.run(sys.executable, "-m", "venv", str(environment.path), external=True, silent=True)
        _install_requirements(session, environment)
        if environment.requirements_without_dependencies:
            _pip_install(session, environment, "--no-deps", *environment.requirements_without_dependencies)
        base_stamp.write_text(base)

    if _read(packages_stamp) != packages:
        session.log(f"installing the packages of this repository into {environment.path.relative_to(ROOT)}")
        # The requirements once more: a newer release of some dependency may want what they forbid (contourpy 1.4 wants
        # NumPy 2), and pip keeps to bounds only within one call. What was preferred meets them, and pip leaves it.
        _pip_install(
            session, environment, "--no-build-isolation", *environment.requirements, *_editable_packages()
        )
        for tool in environment.local_tools:
            _pip_install(session, environment, "--no-build-isolation", "--no-deps", "-e", str(ROOT / tool))
        packages_stamp.write_text(packages)

    if environment.prepare:
        session.run(environment.python, *environment.prepare, external=True, silent=True)
    return environment


def ensure_all(session: nox.Session) -> None:
    """Make all environments that are missing or out of date, two at a time: pip unpacks on one core."""
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(ensure, session, name) for name in ENVIRONMENTS]:
            done.result()


def run(session: nox.Session, environment: Environment, *arguments: str, **variables: str) -> None:
    """Run `python <arguments>` in an environment, from the repository's root."""
    search_path = os.pathsep.join((str(environment.path / "bin"), os.environ.get("PATH", os.defpath)))
    values = {
        "PATH": search_path,
        "VIRTUAL_ENV": str(environment.path),
        "PYTHONPATH": str(ROOT / "tools"),
        "PYTHONNOUSERSITE": "1",
        # As if it were not set: tests start some hundred processes, and each would compile what it imports of the packages.
        "PYTHONDONTWRITEBYTECODE": "",
        **environment.variables,
        **variables,
    }
    session.run(environment.python, *arguments, env=values, external=True)


def _editable_packages() -> list[str]:
    # Dependencies first: pip resolves requirements in the order given, and must have seen a sibling's folder before
    # another package asks for it by name.
    extras = {"hp-platform": "[testing]", "hyper-parallel": "[train]"}
    return [
        part for name in PACKAGES for part in ("-e", str(ROOT / "packages" / name) + extras.get(name, ""))
    ]


def _install_requirements(session: nox.Session, environment: Environment) -> None:
    arguments = (*BUILD, *environment.requirements)
    if environment.preferred:
        preferring = (*environment.preferred, *arguments)
        # A requirement that is not found fails before anything is downloaded, so trying costs a second.
        tried = subprocess.run(
            _pip_command(environment, *preferring), capture_output=True, text=True, check=False
        )
        if tried.returncode == 0:
            return
        if "No matching distribution" in tried.stderr or "ResolutionImpossible" in tried.stderr:
            preferred = ", ".join(environment.preferred)
            session.log(f"pip does not find {preferred} here, so without it: {environment.where_else}")
        else:
            arguments = preferring  # once more, for nox to show why it fails
    _pip_install(session, environment, *arguments)


def _pip_install(session: nox.Session, environment: Environment, *arguments: str) -> None:
    # silent: nox keeps the output and prints it only if the command fails.
    session.run(*_pip_command(environment, *arguments), external=True, silent=True)


def _pip_command(environment: Environment, *arguments: str) -> tuple[str, ...]:
    return (environment.python, "-m", "pip", "install", "--disable-pip-version-check", *arguments)


def _stamps(environment: Environment) -> tuple[str, str]:
    """What the two steps depend on, as one hash each."""
    base = (
        sys.version,
        str(ROOT),
        *BUILD,
        *environment.preferred,
        *environment.requirements,
        *environment.requirements_without_dependencies,
    )
    projects = [ROOT / "packages" / name for name in PACKAGES] + [
        ROOT / tool for tool in environment.local_tools
    ]
    metadata = [
        file.read_text()
        for project in projects
        for file in (
            project / "pyproject.toml",
            *sorted(project.glob("*.pth")),
            *sorted(project.glob("src/*/__about__.py")),
        )
    ]
    return _hash(base), _hash((*base, *metadata))


def _hash(parts: tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _read(stamp: Path) -> str | None:
    return stamp.read_text() if stamp.exists() else None
