"""Saving and loading a sharded state of 256 MiB, ours beside torch.distributed.checkpoint, to a folder on local disk.

Each library saves the DTensors of its own, of equal names, shapes, dtypes and values. What is loaded is compared with what was
saved before a time counts.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.case import Better, Case, Sample
from bench.cases.dtensor import NUM_RANKS, Kind
from bench.ranks import measured_on_ranks

MIB = 2**20
NUM_TENSORS = 16
NUM_REPEATS = 3

State = dict[str, Any]
Save = Callable[[State, str], Any]


def measure_save(name: str, mebibytes: int) -> Sample:
    """On a rank: one ``save``, in milliseconds."""
    return _median_of(name, mebibytes, lambda library, state, folder: _timed(library.save, state, folder))


def measure_async_save(name: str, mebibytes: int) -> Sample:
    """On a rank: until ``async_save`` returns, in milliseconds; the writing ends before the next one begins."""

    def one(library: "_Library", state: State, folder: str) -> float:
        seconds, handle = _seconds(library.async_save, state, folder)
        handle.result()
        return seconds

    return _median_of(name, mebibytes, one)


def measure_load(name: str, mebibytes: int) -> Sample:
    """On a rank: one ``load`` into a state of the same placements, in milliseconds."""

    def one(library: "_Library", state: State, folder: str) -> float:
        library.save(state, folder)
        library.barrier()
        return _timed(library.load, state, folder)

    return _median_of(name, mebibytes, one)


class _Library:
    """The calls of one of the two."""

    def __init__(self, name: str) -> None:
        self.kind = Kind(name)
        torch = self.kind.torch
        self.barrier = torch.distributed.barrier
        if name == "ours":
            import hp_dtensor

            self.save: Save = hp_dtensor.save
            self.async_save: Save = hp_dtensor.async_save
            self.load: Save = hp_dtensor.load
        else:
            import torch.distributed.checkpoint as dcp

            self.save = lambda state, folder: dcp.save(state, checkpoint_id=folder)
            self.async_save = lambda state, folder: dcp.async_save(state, checkpoint_id=folder)
            self.load = lambda state, folder: dcp.load(state, checkpoint_id=folder)

    def state(self, mebibytes: int) -> State:
        """Matrices cut along dim 0, each of an equal share of all bytes."""
        torch = self.kind.torch
        mesh = self.kind.mesh("cpu", torch.distributed.get_world_size())
        generator = torch.Generator().manual_seed(0)
        rows = mebibytes * MIB // NUM_TENSORS // 4 // 1024
        return {
            f"layers.{i}.weight": self.kind.distribute(
                torch.rand((rows, 1024), generator=generator), mesh, [self.kind.shard(0)]
            )
            for i in range(NUM_TENSORS)
        }


def _median_of(name: str, mebibytes: int, one: Callable[[_Library, State, str], float]) -> Sample:
    """The median over saves to new folders; all ranks see the same folder."""
    library = _Library(name)
    torch = library.kind.torch
    state = library.state(mebibytes)
    times = []
    for repeat in range(NUM_REPEATS + 1):
        folder = _shared_folder(torch)
        library.barrier()
        times.append(one(library, state, folder))
        library.barrier()
        if repeat == 0:
            _check(library, state, folder)
            library.barrier()  # the others may still be reading
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(folder)
    return Sample(statistics.median(times[1:]) * 1e3)


def _shared_folder(torch: Any) -> str:
    """A new folder that rank 0 makes; below it ours writes one more per save."""
    names = [tempfile.mkdtemp(prefix="bench-checkpoint-")] if torch.distributed.get_rank() == 0 else [None]
    torch.distributed.broadcast_object_list(names)
    return str(names[0])


def _check(library: _Library, state: State, folder: str) -> None:
    """RuntimeError unless the folder gives back what was saved."""
    torch = library.kind.torch
    found = {name: x.detach().clone() for name, x in state.items()}
    with torch.no_grad():
        for x in found.values():
            x.zero_()
    library.load(found, folder)
    for name, x in state.items():
        if not torch.equal(found[name].to_local(), x.to_local()):
            raise RuntimeError(
                f"{name} came back from {Path(folder).name} with other values: a time would mean nothing"
            )


def _seconds(call: Save, state: State, folder: str) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call(state, folder)
    return time.perf_counter() - start, result


def _timed(call: Save, state: State, folder: str) -> float:
    return _seconds(call, state, folder)[0]


def _case(name: str, summary: str, function: Callable[..., Sample], goal: float) -> Case:
    return Case(
        name=f"checkpoint-{name}",
        summary=f"{summary} of 256 MiB in {NUM_TENSORS} tensors, {NUM_RANKS} ranks on the host",
        ours=measured_on_ranks(NUM_RANKS, function, "ours", 256),
        peer=measured_on_ranks(NUM_RANKS, function, "torch", 256),
        peer_name="torch.distributed.checkpoint",
        unit="ms/call",
        better=Better.LOWER,
        goal=goal,
    )


CASES = (
    _case("save", "save", measure_save, 1.0),
    _case("async-save", "async_save, until it returns,", measure_async_save, 1.0),
    _case("load", "load into the same placements", measure_load, 1.0),
)
