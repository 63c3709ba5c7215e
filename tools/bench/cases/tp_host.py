"""What tensor parallelism costs the host: a tiny layer of one rank of two, whose collectives do nothing, beside torch's.

Short sequences are bound by the host, so this is what counts there; it needs one core and no GPU. A process of its own for each
measurement, with torch's fake process group.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from bench.case import Better, Case, Measure, Sample
from bench.cases.tp_settings import FAMILIES, OF_PEER, OF_PEER_IF_SHORT, SIZES_TINY, Family, Part
from bench.cases.tp_settings import Side as Whose

LENGTH = 16
NUM_STEPS, NUM_WARM = 100, 10
SECONDS = 300.0
LAYERS = {family.name: family for family in FAMILIES if family.part is Part.LAYER}


@contextmanager
def _side(whose: Whose, name: str) -> Iterator[Measure]:
    """Measured in a process that is rank 0 of two, alone."""
    path = os.pathsep.join(path for path in sys.path if path)
    rank = {"RANK": "0", "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, "PYTHONPATH": path, **rank}

    def measure() -> Sample:
        done = subprocess.run(
            [sys.executable, "-m", "bench.cases.tp_host", whose.name, name],
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{whose.value} of {name} failed:\n{done.stderr}")
        return Sample(float(json.loads(done.stdout.splitlines()[-1])))

    yield measure


def microseconds(whose: Whose, name: str) -> float:
    """In this process: what a forward and backward of the layer takes of the processor, the median."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    torch.set_num_threads(1)
    from bench.cases.tp_sides import Built, Inputs
    from hp_platform import init_process_group

    init_process_group()
    of = LAYERS[name]
    family = Family(Part.LAYER, SIZES_TINY, of.sequence_parallel, of.compiled, of.overlap)
    built, inputs = Built(whose, family), Inputs.of(family, LENGTH)
    times = []
    for _ in range(NUM_WARM + NUM_STEPS):
        start = time.thread_time()
        built.step(inputs)
        times.append((time.thread_time() - start) * 1e6)
    return statistics.median(times[NUM_WARM:])


CASES = tuple(
    Case(
        name=f"tp-host-{family.name}",
        summary="processor time of forward and backward of a tiny tensor-parallel layer"
        + (", sequence cut" if family.sequence_parallel else "")
        + (", compiled" if family.compiled else ", eager")
        + (", overlap" if family.overlap else ""),
        ours=partial(_side, Whose.OURS, family.name),
        peer=partial(_side, Whose.PEER, family.name),
        peer_name="torch parallelize_module",
        unit="us/step",
        better=Better.LOWER,
        goal=1 / (OF_PEER if family.compiled else OF_PEER_IF_SHORT),
    )
    for family in LAYERS.values()
)


if __name__ == "__main__":
    print(json.dumps(microseconds(Whose[sys.argv[1]], sys.argv[2])))
