"""The only entry to this repository's work: `nox` runs what CI runs, `nox -l` lists the sessions.

Environments are shared: sessions of one backend use one environment under .nox/ (see tools/nox_support). Arguments after
`--` reach the session's command: `nox -s tests-hp-fsdp-torch -- -k mixed_precision`.
"""

import sys
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

from nox_support import environments, house, training  # noqa: E402 -- found only now that tools/ is on the path

nox.needs_version = ">=2024.10.9"
# Sessions do not get an environment of their own: they share one per backend.
nox.options.default_venv_backend = "none"


@nox.session(name="environments")
def make_environments(session: nox.Session) -> None:
    """Make all environments at once; a session that runs alone makes its own."""
    environments.ensure_all(session)


@nox.session(tags=["quick"])
def lint(session: nox.Session) -> None:
    """Style, imports between packages, and the rules of shared code."""
    environment = environments.ensure(session, "tools")
    environments.run(session, environment, "-m", "ruff", "check")
    environments.run(session, environment, "-m", "ruff", "format", "--check", "--quiet")
    environments.run(session, environment, f"{environment.path}/bin/lint-imports", "--no-cache")
    environments.run(session, environment, "-m", "lint")


@nox.session(tags=["quick"])
def types(session: nox.Session) -> None:
    """Types of all packages and tools, without a framework installed."""
    environment = environments.ensure(session, "tools")
    environments.run(session, environment, "-m", "mypy", *session.posargs)


@nox.session(name="tests-tools", tags=["quick"])
def tests_tools(session: nox.Session) -> None:
    """Tests of the tools of this repository."""
    environment = environments.ensure(session, "tools")
    environments.run(session, environment, "-m", "pytest", *house.TESTED_TOOLS, *session.posargs)


@nox.session(name="tests-npu-emulator-npu", tags=["npu-emulator", "npu"])
def tests_npu_emulator(session: nox.Session) -> None:
    """Tests of the emulated CANN under the real torch_npu."""
    environment = environments.ensure(session, "npu")
    environments.run(
        session, environment, "-m", "pytest", "tools/npu_emulator/tests", *house.SPREAD, *session.posargs
    )


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site; a warning is an error."""
    environment = environments.ensure(session, "tools")
    build = ("-m", "mkdocs", "build", "--strict", "--config-file", "docs/mkdocs.yml")
    # The variable silences the theme's note about its successor, not warnings about our pages.
    environments.run(session, environment, *build, *session.posargs, NO_MKDOCS_2_WARNING="1")


@nox.session
def isolation(session: nox.Session) -> None:
    """Every package's wheel alone: it imports without a framework and pulls in only what it declares."""
    environment = environments.ensure(session, "tools")
    environments.run(session, environment, "-m", "nox_support.isolation", *session.posargs)


def _run_tests(session: nox.Session, backend: str, folder: str) -> None:
    environment = environments.ensure(session, backend)
    # Required as well as selected: a backend that is missing fails the session instead of skipping its tests.
    backends = {"HP_TEST_BACKENDS": backend, "HP_REQUIRE_BACKENDS": backend}
    chosen = () if backend == house.FIRST_BACKEND else ("-m", "not once")
    # Arguments after `--` come last, so `-- -n 0` ends the spreading (for --pdb).
    environments.run(
        session, environment, "-m", "pytest", folder, *house.SPREAD, *chosen, *session.posargs, **backends
    )


def _add_tests(package: str, backend: str) -> None:
    @nox.session(name=f"tests-{package}-{backend}", tags=house.tags(backend, package))
    def tests(session: nox.Session) -> None:
        _run_tests(session, backend, f"packages/{package}/tests")

    tests.__doc__ = f"Tests of {package} on {backend}."


def _add_integration(backend: str) -> None:
    @nox.session(name=f"integration-{backend}", tags=house.tags(backend))
    def integration(session: nox.Session) -> None:
        _run_tests(session, backend, "integration_tests")

    integration.__doc__ = f"Tests that need more than one package, on {backend}."


for _package, _backends in house.TESTED_BACKENDS.items():
    for _backend in _backends:
        _add_tests(_package, _backend)
for _backend in house.BACKENDS:
    _add_integration(_backend)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Benchmarks against peers: `nox -s bench -- --list`, then the names of cases."""
    environment = environments.ensure(session, "torch")
    environments.run(session, environment, "-m", "bench", *session.posargs)


@nox.session(name="full-hp-dtensor", default=False)
def full_hp_dtensor(session: nox.Session) -> None:
    """Every rule of hp-dtensor in all combinations of placements (docs: how rules are checked), on torch; `-- -k softmax`."""
    environment = environments.ensure(session, "torch")
    rules = sorted(str(path) for path in Path("packages/hp-dtensor/tests").rglob("test_rules*.py"))
    rules = [path for path in rules if "mindspore_only" not in path]
    # A part of a case takes up to a minute where a sample takes milliseconds.
    variables = {
        "HP_TEST_BACKENDS": "torch",
        "HP_REQUIRE_BACKENDS": "torch",
        "HP_FULL_RULES": "1",
        "HP_TEST_TIMEOUT_SCALE": "60",
    }
    environments.run(
        session, environment, "-m", "pytest", *rules, *house.SPREAD, *session.posargs, **variables
    )


@nox.session(name="op-table", default=False)
def op_table(session: nox.Session) -> None:
    """Make the page of operations in the docs anew, by what their rules do on torch and on MindSpore."""
    for framework in ("torch", "mindspore"):
        environment = environments.ensure(session, framework)
        environments.run(session, environment, "-m", "op_table", framework)
    environments.run(session, environment, "-m", "op_table", "page")


@nox.session(name="training-curves", default=False)
def training_curves(session: nox.Session) -> None:
    """Train with AdamW and with Muon, and draw both for the guide of the optimizers; about half an hour on two cores."""
    environment = environments.ensure(session, "torch")
    environments.run(session, environment, "-m", "training_curves", *session.posargs)


@nox.session(default=False)
def train(session: nox.Session) -> None:
    """Train a small language model on real text, sharded over 4 processes: options after `--`, see `-- --help`."""
    environment = environments.ensure(session, training.environment_for(session.posargs))
    environments.run(session, environment, "-m", "hyper_parallel", "train", *session.posargs)
