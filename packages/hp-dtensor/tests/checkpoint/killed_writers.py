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
from hp_dtensor.checkpoint.agreement import State, Tensor
from hp_dtensor.checkpoint.boxes import Box
from hp_dtensor.checkpoint.plan import make_plan
from hp_dtensor.checkpoint.saving import Job
from hp_dtensor.checkpoint.sources import streamed

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


def one_of_two_ranks(root: Path, times: int) -> Counter[str]:
    """One of two ranks is killed; the other one ends by itself. After the planning ranks meet by files only."""
    half = ELEMENTS // 2
    found: Counter[str] = Counter()
    before = -1.0

    def save_on_both(value: float, victim: int | None, moment: float = 0.0) -> float:
        boxes = [Box((rank * half,), (half,)) for rank in range(2)]
        tensor = Tensor("F32", (2 * half,), {box: [rank] for rank, box in enumerate(boxes)})
        plan = make_plan(State("dict", ["w"], tensors={"w": tensor}), 2)
        folder = folders.folder_of(root, folders.make_new(root))
        x = torch.full((half,), value)

        def run(rank: int) -> None:
            job = Job(folder, rank, plan, {}, None, 0.3)
            job.run({key: streamed(x) for key in plan.pieces[rank]})

        started = time.perf_counter()
        writers = [in_child(lambda rank=rank: run(rank)) for rank in range(2)]
        if victim is not None:
            time.sleep(moment)
            os.kill(writers[victim], signal.SIGKILL)
        for pid in writers:
            os.waitpid(pid, 0)
        return time.perf_counter() - started

    usual = save_on_both(before, None)
    for value in range(times):
        save_on_both(float(value), value % 2, random.uniform(0, 1.5 * usual))
        x = load(root)["w"]
        assert bool((x == x[0]).all()), "a mixture of two saves"
        assert x[0] in (before, float(value))
        found["new" if x[0] == value else "previous"] += 1
        before = float(x[0])
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)  # no threads of kernels, which a fork would lose
    random.seed(int(sys.argv[2]))
    root = Path(sys.argv[1])
    told = {
        "random": at_random_moments(root / "a", 20),
        "steps": before_every_step(root / "b"),
        "ranks": one_of_two_ranks(root / "c", 8),
    }
    json.dump(told, sys.stdout)
