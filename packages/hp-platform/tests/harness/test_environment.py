"""What torchrun and msrun say, as one value."""

import re

import pytest

from hp_platform.launch import LaunchEnvironment, environment

pytestmark = pytest.mark.once

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
}
MSRUN = {
    "MS_WORKER_NUM": "8",
    "MS_NODE_ID": "5",
    "RANK_ID": "5",
    "DEVICE_ID": "1",
    "MS_ROLE": "MS_WORKER",
    "MS_SCHED_HOST": "node0",
    "MS_SCHED_PORT": "8118",
}


def test_a_process_without_launcher_has_no_environment() -> None:
    assert environment({"PATH": "/bin"}) is None


def test_torchrun_variables_are_read() -> None:
    assert environment(TORCHRUN) == LaunchEnvironment("torchrun", 5, 8, 1, 4, "node0", 1234)


def test_msrun_variables_are_read() -> None:
    assert environment(MSRUN) == LaunchEnvironment("msrun", 5, 8, 1, None, "node0", 8118)


def test_msrun_node_id_stands_for_a_missing_rank_id() -> None:
    found = environment({name: value for name, value in MSRUN.items() if name != "RANK_ID"})
    assert found is not None
    assert found.rank == 5


def test_the_msrun_scheduler_is_no_rank() -> None:
    assert environment({**MSRUN, "MS_ROLE": "MS_SCHED"}) is None


def test_torchrun_wins_over_msrun() -> None:
    found = environment({**MSRUN, **TORCHRUN, "RANK": "2"})
    assert found is not None
    assert (found.launcher, found.rank) == ("torchrun", 2)


def test_what_may_be_missing_has_the_launchers_defaults() -> None:
    assert environment({"RANK": "1", "WORLD_SIZE": "2"}) == LaunchEnvironment(
        "torchrun", 1, 2, 1, None, "127.0.0.1", 29500
    )
    found = environment({"MS_WORKER_NUM": "2", "RANK_ID": "1"})
    assert found == LaunchEnvironment("msrun", 1, 2, 1, None, "127.0.0.1", 8118)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set, but other variables of torchrun are"),
        ({"WORLD_SIZE": "2"}, "RANK is not set, but other variables of torchrun are"),
        ({"MS_WORKER_NUM": "2"}, "MS_NODE_ID is not set, but other variables of msrun are"),
        ({**TORCHRUN, "RANK": "eight"}, "RANK='eight' is no whole number"),
        ({**TORCHRUN, "RANK": "8"}, "RANK=8 and WORLD_SIZE=8: the rank must be in 0 ... 7"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT='http' is no whole number"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4, LOCAL_WORLD_SIZE=4 and WORLD_SIZE=8"),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, "LOCAL_RANK=-1: the rank on this host must be 0 or more"),
    ],
)
def test_contradicting_variables_are_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        environment(variables)
