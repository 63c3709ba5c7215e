"""Run by test_killed_saves.py: writers that are killed, at random moments and before every step that changes the disk.

Children are forked, so that the framework is imported once. Prints what was found, as JSON.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from hp_dtensor import load, save
from hp_dtensor.checkpoint import folders

ELEMENTS = 1 << 20  # 4 MiB in 4 tensors


def state_of(version: int) -> dict[str, Any]:
    return {"version": version, **{f"w{i}": torch.full((ELEMENTS // 4,), float(version)) for i in range(4)}}


def loaded(root: Path) -> int:
    """The version that loads, whole."""
    found = load(root)
    for i in range(4):
        x = found[f"w{i}"]
        assert x.shape == (ELEMENTS // 4,)
        assert bool((x == found["version"]).all()), "a mixture of two saves"
    version: int = found["version"]
    return version


def in_child(run: Any) -> int:
    """Fork; the child leaves without any clean-up."""
    pid = os.fork()
    if pid == 0:
        try:
            run()
        finally:
            os._exit(0)
    return pid


def at_random_moments(root: Path, times: int) -> Counter[str]:
    save(state_of(0), root)
    started = time.perf_counter()
    save(state_of(1), root)
    usual = time.perf_counter() - started
    found: Counter[str] = Counter()
    before = 1
    for version in range(2, 2 + times):
        state = state_of(version)
        pid = in_child(lambda state=state: save(state, root))
        time.sleep(random.uniform(0, 1.5 * usual))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        now = loaded(root)
        assert now in (before, version), (before, version, now)
        found["new" if now == version else "previous"] += 1
        before = now
        found["incomplete"] = len(folders.incomplete(root))
    return found


def before_every_step(root: Path) -> Counter[str]:
    """Exit just before the n-th call that changes the disk, for every n."""
    save(state_of(1), root)
    state, step, found = state_of(2), 0, Counter[str]()
    while True:
        step += 1

        def run(step: int = step) -> None:
            count = 0
            for name in ("fsync", "replace", "mkdir", "open"):
                usual = getattr(os, name)

                def counted(*args: Any, usual: Any = usual, **kwargs: Any) -> Any:
                    nonlocal count
                    count += 1
                    if count == step:
                        os._exit(1)
                    return usual(*args, **kwargs)

                setattr(os, name, counted)
            save(state, root)

        _, status = os.waitpid(in_child(run), 0)
        version = loaded(root)
        if os.waitstatus_to_exitcode(status) == 0:
            assert version == 2
            return found
        found["new" if version == 2 else "previous"] += 1
        if version == 2:
            save(state_of(1), root)


if __name__ == "__main__":
    torch.set_num_threads(1)  # no threads of kernels, which a fork would lose
    random.seed(int(sys.argv[2]))
    root = Path(sys.argv[1])
    told = {"random": at_random_moments(root / "a", 20), "steps": before_every_step(root / "b")}
    json.dump(told, sys.stdout)
