"""A program that just ends after a collective ends well: no thread of the backend is left that could hold a tensor."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hp_platform.launch._ports import reserve_ports

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(
        not os.path.isdir("/proc/self/task"), reason="counts the threads that Linux shows in /proc"
    ),
]

# What is registered first runs last: after everything that the library does at exit.
PROGRAM = """
import atexit, os
def name(task):
    try:
        return open(f"/proc/self/task/{task}/comm").read().strip()
    except (FileNotFoundError, ProcessLookupError):  # it ended after it was listed
        return ""
def threads():
    return sum(name(task).startswith("pt_gloo") for task in os.listdir("/proc/self/task"))
atexit.register(lambda: print("at exit", threads()))
import torch
from hp_platform import collectives, init_device_mesh
mesh = init_device_mesh("cpu", (2,))
kept = collectives.all_reduce(torch.ones(4), mesh.get_group())
print("running", threads() > 0)
"""


def _run(program: str) -> list[tuple[int, str, str]]:
    with reserve_ports() as ports:
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports.first)}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", program],
                env={
                    **os.environ,
                    **place,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "HYPER_PARALLEL_PLATFORM": "torch",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        told = [rank.communicate(timeout=60) for rank in ranks]
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, told, strict=True)]


def test_the_groups_of_a_program_that_does_not_end_them_are_ended_before_the_interpreter() -> None:
    for code, out, err in _run(PROGRAM):
        assert (code, out.split("\n")) == (0, ["running True", "at exit 0", ""]), err


def test_a_group_that_was_ended_is_refused_and_frees_its_threads() -> None:
    ending = """
from hp_platform import destroy_process_group
group = mesh.get_group()
destroy_process_group()
print("after", threads())
try:
    collectives.all_reduce(kept, group)
except RuntimeError as error:
    print("was ended by destroy_process_group" in str(error))
"""
    for code, out, err in _run(PROGRAM + ending):
        assert (code, out.split("\n")) == (0, ["running True", "after 0", "True", "at exit 0", ""]), err
