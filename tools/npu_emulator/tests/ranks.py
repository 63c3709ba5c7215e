"""Runs a function of a test module in several processes, each with one device and one rank.

A child is this file run as a script: it imports the module by name, joins a process group and calls the function.
"""

import faulthandler
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Outcome:
    """How a rank ended. `value` is what the function returned, None if it did not return."""

    status: int
    value: Any
    errors: str


def run(module: str, function: str, world: int, *, limit_s: float = 180, **environment: str) -> list[Outcome]:
    """Call `module.function(device)` on `world` ranks; the value must be JSON.

    However the ranks end, they must leave no socket and no shared memory behind.
    """
    shared_memory = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = []
        for rank in range(world):
            env = os.environ | {
                "NPU_EMULATOR_HCCL_TIMEOUT_S": "60",
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "STORE": str(folder / "store"),
                "LIMIT_S": str(limit_s),
                "RESULT": str(folder / f"{rank}.json"),
                **environment,
            }
            with open(folder / f"{rank}.err", "w") as errors:
                command = [sys.executable, str(_TESTS / "ranks.py"), module, function]
                children.append(subprocess.Popen(command, env=env, stdout=errors, stderr=errors))
        deadline = time.monotonic() + limit_s
        for child in children:
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        _assert_nothing_left([child.pid for child in children], shared_memory)
        return [_outcome(folder, rank, child.returncode) for rank, child in enumerate(children)]


def values(module: str, function: str, world: int, **environment: str) -> list[Any]:
    """Like `run`, for a function that must succeed on every rank."""
    outcomes = run(module, function, world, **environment)
    for rank, outcome in enumerate(outcomes):
        assert outcome.status == 0, f"rank {rank} ended with status {outcome.status}:\n{outcome.errors}"
    return [outcome.value for outcome in outcomes]


def _assert_nothing_left(pids: list[int], shared_memory_before: set[str]) -> None:
    """Sockets are named after the process that created the communicator; other runs may go on beside this one."""
    sockets = Path("/proc/net/unix").read_text()
    assert not [pid for pid in pids if f"npu_emulator/{pid}_" in sockets]
    files = set(os.listdir("/dev/shm")) - shared_memory_before
    assert not [name for name in files if "npu" in name or "hccl" in name]


def _outcome(folder: Path, rank: int, status: int) -> Outcome:
    result = folder / f"{rank}.json"
    value = json.loads(result.read_text()) if result.exists() else None
    return Outcome(status, value, (folder / f"{rank}.err").read_text())


def _child(module: str, function: str) -> None:
    import torch
    import torch.distributed as dist
    import torch_npu  # noqa: F401

    # A rank that hangs says where, before it is killed.
    faulthandler.dump_traceback_later(0.9 * float(os.environ["LIMIT_S"]), exit=True)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=world)
    value = getattr(importlib.import_module(module), function)(torch.device("npu", rank))
    Path(os.environ["RESULT"]).write_text(json.dumps(value))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(_TESTS))
    _child(*sys.argv[1:])
