"""Every package's built wheel alone, in a fresh environment, with its siblings resolved from the built wheels only.

For each package: exactly what it declares gets installed, no framework is among it, and the import works without one, in
less than 100 ms. Run by `nox -s isolation`; `python -m nox_support.isolation hp-fsdp` checks one package.
"""

import email
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nox_support.house import PACKAGES, ROOT, module_name

FOLDER = ROOT / ".nox" / "isolation"
FRAMEWORKS = frozenset({"torch", "torch-npu", "mindspore"})
IMPORT_LIMIT_MS = 100.0
# A fresh process per run; the best one counts, because a busy machine only ever adds time.
IMPORT_RUNS = 7
IMPORT_SCRIPT = """
import sys, time
start = time.perf_counter()
import {module}
print((time.perf_counter() - start) * 1000)
assert {module}.__version__, "the package has no version"
assert not {{"torch", "torch_npu", "mindspore"}} & set(sys.modules), "a framework was imported"
"""


class IsolationError(Exception):
    """A package does not stand alone."""


def main(packages: list[str]) -> int:
    """Check the named packages, or all; print one line each and return the exit status."""
    wheels, third_party = FOLDER / "dist", FOLDER / "wheelhouse"
    build_wheels(wheels)
    requires = {wheel_name(wheel): runtime_requirements(wheel) for wheel in wheels.glob("*.whl")}
    download(third_party, requires)
    requires |= {wheel_name(wheel): runtime_requirements(wheel) for wheel in third_party.glob("*.whl")}

    failed = False
    for package in packages or PACKAGES:
        try:
            installed, milliseconds = check(package, requires, (wheels, third_party))
        except IsolationError as error:
            failed = True
            print(f"{package:16} FAILED: {error}")
        else:
            print(f"{package:16} imports in {milliseconds:5.1f} ms; installs {', '.join(sorted(installed))}")
    return 1 if failed else 0


def build_wheels(folder: Path) -> None:
    """Build the wheel of every package into an empty folder and look at what it holds."""
    shutil.rmtree(folder, ignore_errors=True)
    projects = [str(ROOT / "packages" / name) for name in PACKAGES]
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), *projects)
    for package in PACKAGES:
        (wheel,) = folder.glob(f"{module_name(package)}-*.whl")
        names = set(zipfile.ZipFile(wheel).namelist())
        for part in ("py.typed", "__init__.py", "__about__.py"):
            if f"{module_name(package)}/{part}" not in names:
                raise SystemExit(f"{wheel.name} does not hold {module_name(package)}/{part}")
        if not any(name.endswith("licenses/LICENSE") for name in names):
            raise SystemExit(f"{wheel.name} does not hold its LICENSE")


def download(folder: Path, requires: Mapping[str, list[Requirement]]) -> None:
    """Fetch the third-party wheels that the packages need at run time, once for all of them."""
    wanted = {str(need) for needs in requires.values() for need in needs if need.name not in requires}
    # Kept between runs: pip skips what is there.
    _pip("download", "--only-binary", ":all:", "--dest", str(folder), *sorted(wanted))


def check(
    package: str, requires: Mapping[str, list[Requirement]], sources: Iterable[Path]
) -> tuple[set[str], float]:
    """Install one package into a fresh environment; return what got installed and its import time in ms."""
    environment = FOLDER / "venv"
    venv.create(environment, clear=True, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    find_links = [f"--find-links={source}" for source in sources]
    _pip("--python", str(python), "install", "--no-index", "--no-compile", *find_links, package)

    (site_packages,) = environment.glob("lib/python3*/site-packages")
    installed: set[str] = {
        canonicalize_name(dist.metadata["Name"]) for dist in distributions(path=[str(site_packages)])
    }
    verify_installed(package, installed, requires)
    return installed, import_time(python, module_name(package))


def verify_installed(package: str, installed: set[str], requires: Mapping[str, list[Requirement]]) -> None:
    """Exactly the declared closure is there, it names no framework, and the meta-package brings the whole house."""
    if frameworks := installed & FRAMEWORKS:
        raise IsolationError(f"pulls in {', '.join(sorted(frameworks))}; a framework belongs in an extra")
    declared = closure(package, requires)
    if installed != declared:
        raise IsolationError(
            f"installed but not declared: {sorted(installed - declared) or 'nothing'}; "
            f"declared but not installed: {sorted(declared - installed) or 'nothing'}"
        )
    if package == "hyper-parallel" and (missing := set(PACKAGES) - installed):
        raise IsolationError(f"does not pull in {', '.join(sorted(missing))}; add them to its dependencies")


def import_time(python: Path, module: str) -> float:
    """The best of several fresh processes, in ms; refused if it is not below the limit."""
    times = []
    for _ in range(IMPORT_RUNS):
        command = [str(python), "-c", IMPORT_SCRIPT.format(module=module)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=FOLDER)
        if result.returncode:
            raise IsolationError(f"import {module} failed without a framework:\n{result.stderr}")
        times.append(float(result.stdout))
    if min(times) >= IMPORT_LIMIT_MS:
        raise IsolationError(
            f"import takes {min(times):.0f} ms, the limit is {IMPORT_LIMIT_MS:.0f} ms; "
            f"`python -X importtime -c 'import {module}'` shows what to load later"
        )
    return min(times)


def closure(package: str, requires: Mapping[str, list[Requirement]]) -> set[str]:
    """All distributions that `package` declares, directly or through what it declares, and itself."""
    found: set[str] = set()
    waiting = [canonicalize_name(package)]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [canonicalize_name(need.name) for need in requires[name]]
    return found


def wheel_name(wheel: Path) -> str:
    """The normalised name of the distribution in a wheel file."""
    return canonicalize_name(wheel.name.split("-")[0])


def runtime_requirements(wheel: Path) -> list[Requirement]:
    """What a wheel needs on this machine, without extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    needs = [Requirement(text) for text in metadata.get_all("Requires-Dist") or []]
    return [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}\n{result.stdout}{result.stderr}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
