"""Workers that are forked from a server: they are as fresh ones, and end with whoever asked for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hp_platform.launch import WorkerError
from hp_platform.launch._group import WorkerGroup
from hp_platform.testing.fork_server import ForkServers

sys.path.insert(0, str(Path(__file__).parent))
from processes import assert_gone

pytestmark = pytest.mark.once
MODULES = ("numpy.random", "a_module_that_is_not_installed")


@pytest.fixture
def servers() -> Iterator[ForkServers]:
    made = ForkServers(max_servers=2)
    yield made
    made.close()


def group(servers: ForkServers, num_processes: int = 2, **options: Any) -> WorkerGroup:
    return WorkerGroup(num_processes, capture=True, start=partial(servers.start, MODULES), **options)


def on_all(
    servers: ForkServers, function: Callable[[], Any], num_processes: int = 2, **options: Any
) -> list[Any]:
    with group(servers, num_processes, **options) as workers:
        found = workers.call(function)
        workers.discard()
    return found


def parents() -> int:
    return os.getppid()


def test_workers_are_children_of_two_servers_that_serve_the_next_group_too(servers: ForkServers) -> None:
    first = on_all(servers, parents, 4)
    assert first[0] == first[2] != first[1] == first[3]
    assert os.getpid() not in first
    assert on_all(servers, parents, 4) == first


def test_they_have_the_variables_and_the_place_of_fresh_ones(servers: ForkServers) -> None:
    def place() -> tuple[Any, ...]:
        from hp_platform.launch import environment

        found = environment()
        return (
            found,
            os.environ["HERE"],
            os.getsid(0) == os.getpid(),
            sys.stdin.read(),
            "numpy.random" in sys.modules,
        )

    for word in ("a", "b"):
        for rank, (found, here, leads, given, has_imported) in enumerate(
            on_all(servers, place, env={"HERE": word})
        ):
            assert (found.rank, found.local_rank, found.world_size) == (rank, rank, 2)
            assert (here, leads, given, has_imported) == (word, True, "", True)


def test_what_an_import_may_read_has_a_server_of_its_own_and_the_longest_unused_ends(
    servers: ForkServers,
) -> None:
    (first,) = on_all(servers, parents, 1, env={"HERE": "a"})
    (second,) = on_all(servers, parents, 1, env={"HERE": "b"})
    assert first != second
    assert on_all(servers, parents, 1, env={"HERE": "a"}) == [first]
    on_all(servers, parents, 1, env={"HERE": "c"})
    assert_gone([second], 0)
    assert on_all(servers, parents, 1, env={"HERE": "a"}) == [first]


def test_a_server_with_living_workers_stays_whatever_comes(servers: ForkServers) -> None:
    with group(servers, 1, env={"HERE": "a"}) as workers:
        (first,) = workers.call(parents)
        for word in ("b", "c", "d"):
            on_all(servers, parents, 1, env={"HERE": word})
        assert workers.call(parents) == [first]
        workers.discard()


def test_hashes_differ_between_neighbours_and_random_numbers_between_all(servers: ForkServers) -> None:
    def drawn() -> tuple[Any, ...]:
        import random

        import numpy as np

        return hash("a name"), random.random(), np.random.random()

    hashes, *numbers = zip(*on_all(servers, drawn, 4), strict=True)
    assert hashes[0] == hashes[2] != hashes[1] == hashes[3]
    for found in numbers:
        assert len(set(found)) == 4


def test_output_and_ends_are_told_as_of_fresh_ones(servers: ForkServers) -> None:
    def end(how: str) -> None:
        print("it ends", flush=True)
        if how == "code":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)

    for how, told in (("code", "exited with code 3"), ("signal", r"was killed by signal 9 \(SIGKILL\)")):
        workers = group(servers, 1)
        with pytest.raises(WorkerError, match=f"rank 0 of 1 {told}"):
            workers.call(end, (how,))
        assert workers.output(0) == "it ends\n"
        assert_gone(workers.pids, 0)
        workers.discard()
    assert len(on_all(servers, parents)) == 2


def test_a_server_that_died_took_its_workers_along_and_the_next_group_gets_another(
    servers: ForkServers,
) -> None:
    workers = group(servers, 1)
    (server,) = workers.call(parents)
    os.kill(server, signal.SIGKILL)
    with pytest.raises(WorkerError, match="rank 0 of 1"):
        workers.call(time.sleep, (60,))
    assert_gone(workers.pids, 1)
    workers.discard()
    assert on_all(servers, parents, 1) != [server]


def test_all_end_with_the_process_that_asked(tmp_path: Path) -> None:
    script = f"""
import os, subprocess, sys, time
sys.path[:] = {sys.path!r}
from functools import partial
from hp_platform.launch._group import WorkerGroup
from hp_platform.testing.fork_server import ForkServers
servers = ForkServers()
workers = WorkerGroup(2, start=partial(servers.start, ()))
print(*workers.pids, *workers.call(os.getppid), flush=True)
time.sleep(600)
"""
    job = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    pids = [int(pid) for pid in job.stdout.readline().split()]
    assert len(pids) == 4
    job.kill()
    job.communicate()
    assert_gone(pids, 5)
