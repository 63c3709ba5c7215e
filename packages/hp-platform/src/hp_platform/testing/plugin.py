"""The pytest plugin: ``-p hp_platform.testing.plugin``."""

from __future__ import annotations

import inspect
import itertools
import os
import sys
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from hp_platform.launch._transport import dumps
from hp_platform.testing._remote import Outcome, TestCall
from hp_platform.testing.backends import (
    COUNT_VARIABLE,
    REQUIRE_VARIABLE,
    Selection,
    select,
    timeout_scale,
    told,
)
from hp_platform.testing.decorator import Case, Distributed, cases, tag_of
from hp_platform.testing.pool import Pool, PoolCache, TestFailedError
from hp_platform.testing.programs import Programs
from hp_platform.testing.strictness import Filters

_SELECTION = pytest.StashKey[Selection]()
_POOLS = pytest.StashKey[PoolCache]()


def pytest_configure(config: pytest.Config) -> None:
    """Decide on the backends of the run before anything is collected."""
    try:
        config.stash[_SELECTION] = select(os.environ)
        config.stash[_POOLS] = PoolCache(scale=timeout_scale(os.environ))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    environment = pytest.MonkeyPatch()
    environment.setenv(COUNT_VARIABLE, told(config.stash[_SELECTION].devices))
    config.add_cleanup(environment.undo)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the workers. Not later: whoever runs this process beside others (pytest-xdist) ends it once its session is over."""
    session.config.stash[_POOLS].close()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Name the backends, and those that are missing."""
    return config.stash[_SELECTION].header()


@pytest.fixture(scope="session")  # hypothesis refuses tests with fixtures of function scope
def world(request: pytest.FixtureRequest) -> Case:
    """In the pytest process the case; the workers give the test function a :class:`hp_platform.testing.World` instead."""
    if not isinstance(getattr(request, "param", None), Case):
        pytest.fail(
            "the fixture `world` belongs to tests that are marked with @distributed(...)", pytrace=False
        )
    case: Case = request.param
    return case


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> Programs:
    """Runs Python programs of the test's own, from an interpreter that has its framework imported."""
    return Programs(request.config.stash[_POOLS].servers)


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per backend and size; first, so that ids begin with them."""
    tag = tag_of(metafunc.function)
    if tag is None:
        return
    selection = metafunc.config.stash[_SELECTION]
    found = []
    for case in cases(tag, selection):
        is_skipped = case.absence and case.backend not in selection.required
        marks = [pytest.mark.skip(reason=f"{case.backend}: {case.absence}")] if is_skipped else []
        found.append(pytest.param(case, id=case.id, marks=marks))
    metafunc.parametrize("world", found, indirect=True, scope="function")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Within a file, bring tests of one pool together: more pools than may idle would be started again and again."""
    groups = itertools.groupby(items, key=lambda item: item.path)
    items[:] = [item for _, group in groups for item in sorted(group, key=_pool_key)]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a distributed test on its pool instead of here."""
    tag = tag_of(pyfuncitem.function)
    if tag is None:
        return None
    case = pyfuncitem.funcargs["world"]
    assert isinstance(case, Case)
    if case.absence:
        pytest.fail(f"{REQUIRE_VARIABLE} requires {case.backend}, but {case.absence}", pytrace=False)
    try:
        outcome = _run(pyfuncitem, tag, case)
    except TestFailedError as failure:
        for rank, output in enumerate(failure.outputs):
            if output.strip():
                pyfuncitem.add_report_section("call", f"rank {rank} output", output)
        text = str(failure)
    else:
        _repeat(outcome)
        return True
    # Outside of the except block: the pytest process' own traceback says nothing that the worker's does not.
    pytest.fail(text, pytrace=False)


def _run(item: pytest.Function, tag: Distributed, case: Case) -> Outcome:
    call = _call(item, case)
    pools = item.config.stash[_POOLS]
    if not tag.isolated:
        return pools.get(case.backend, case.world_size, call.filters).run(call, timeout=tag.timeout)
    pool = Pool(
        case.backend,
        case.world_size,
        init=tag.init,
        filters=call.filters,
        scale=pools.scale,
        servers=pools.servers,
    )
    try:
        return pool.run(call, timeout=tag.timeout, check_step=False)
    finally:
        pool.close()


def _call(item: pytest.Function, case: Case) -> TestCall:
    name = item.originalname
    if item.cls is not None:
        name = f"{item.cls.__qualname__}.{name}"
    if "<locals>" in name:
        raise pytest.UsageError(f"{item.nodeid}: workers cannot import what is defined inside of a function")
    wanted = [
        name
        for name in inspect.signature(item.function).parameters
        if name in item.funcargs and name != "world"
    ]
    try:
        arguments = dumps({name: item.funcargs[name] for name in wanted})
    except Exception as error:
        raise TestFailedError(
            f"the arguments {', '.join(wanted)} cannot be sent to the workers ({type(error).__name__}: {error}): "
            "make in the test what cannot be pickled",
            (),
        ) from error
    return TestCall(
        path=str(item.path),
        module=item.module.__name__,
        function=name,
        arguments=arguments,
        sys_path=tuple(sys.path),
        backend=case.backend,
        filters=_filters(item),
    )


def _filters(item: pytest.Item) -> Filters:
    # The mark that stands closest to the test is listed first, and shall win.
    marks: Generator[Sequence[str], None, None] = (mark.args for mark in item.iter_markers("filterwarnings"))
    return Filters(
        patterns=tuple(item.config.getini("filterwarnings")),
        literals=tuple(item.config.getoption("pythonwarnings") or ()),
        marks=tuple(reversed([text for texts in marks for text in reversed(texts)])),
    )


def _repeat(outcome: Outcome) -> None:
    if outcome.kind == "skipped":
        # Shown at the test's own line, as a skip mark is; pytest.skip() would show this one.
        raise pytest.skip.Exception(outcome.reason, _use_item_location=True)
    if outcome.kind == "xfailed":
        pytest.xfail(outcome.reason)


def _pool_key(item: pytest.Item) -> tuple[Any, ...]:
    call_spec = getattr(item, "callspec", None)
    case = call_spec.params.get("world") if call_spec is not None else None
    return (case.backend, case.world_size) if isinstance(case, Case) else ("", 0)
