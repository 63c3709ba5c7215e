"""Processes for cases that need more than one rank: started once per number of ranks, used by both sides in turn."""

import atexit
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, TypeVar

from bench.case import Measure, Sample

# From nothing to the first collective, on a busy machine; a measurement takes far less.
SECONDS = 600.0
Result = TypeVar("Result")


def measured_on_ranks(
    num_ranks: int, function: Callable[..., Sample], *args: Any
) -> Callable[[], AbstractContextManager[Measure]]:
    """A side whose measurement is ``function(*args)`` on all ranks of a world; that of rank 0 counts.

    ``function`` builds, measures and frees, and stands in a module, so that the processes can import it.
    """

    @contextmanager
    def side() -> Iterator[Measure]:
        yield lambda: on_ranks(num_ranks, function, *args)[0]

    return side


def on_ranks(num_ranks: int, function: Callable[..., Result], *args: Any) -> list[Result]:
    """``function(*args)`` on all ranks of a world; the results by rank. The processes stay for the next call."""
    group = _ranks(num_ranks)
    if not group.is_alive:  # a call has failed, which ended its processes
        _ranks.cache_clear()
        group = _ranks(num_ranks)
    results: list[Result] = group.call(function, args, timeout=SECONDS)
    return results


@cache
def _ranks(num_ranks: int) -> Any:
    # The processes that hp_platform.launch.spawn starts, but kept: both sides are to meet the same, warm ones.
    from hp_platform.launch._group import WorkerGroup

    group = WorkerGroup(num_ranks, env={"OMP_NUM_THREADS": "1"})
    atexit.register(lambda: group.close() if group.is_alive else group.discard())
    group.call(_join, (num_ranks,), timeout=SECONDS)
    return group


def _join(num_ranks: int) -> None:
    """One thread per rank, so that the call and not the scheduler is measured; the GPU of the rank where there are enough."""
    import torch

    from hp_platform import init_process_group

    torch.set_num_threads(1)
    if device_type(num_ranks) == "cuda":
        import torch.distributed as dist

        torch.cuda.set_device(int(dist.get_node_local_rank()))
    init_process_group(device_id="cpu" if device_type(num_ranks) == "cpu" else None)
    if num_ranks == 1:  # our world of one process needs no group of torch's, but the peers do
        backend = "nccl" if device_type(1) == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, rank=0, world_size=1)


def device_type(num_ranks: int) -> str:
    """Where a world of so many ranks runs: on GPUs if each has its own."""
    import torch

    return "cuda" if torch.cuda.device_count() >= num_ranks else "cpu"


def times_of_calls(call: Callable[[], object], num_calls: int, num_repeats: int, device: str) -> list[float]:
    """On all ranks: seconds of one call, for each repetition; all begin together, and a device is waited for."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(num_repeats):
        wait()
        torch.distributed.barrier()
        wait()
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        wait()
        times.append((time.perf_counter() - start) / num_calls)
    return times
