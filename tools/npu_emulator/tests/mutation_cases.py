"""Wrong programs, for test_mutations.py: each must look wrong over the emulation."""

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def _read(x: Tensor) -> float:
    return (x * 1)[0].item()


def awaited_and_not(device: torch.device) -> dict[str, list[float]]:
    """[value where the program waits, value where it does not] for each way to forget it. Right is 2, 2 and 5."""
    return {
        "async collective": [_async_collective(device, waits) for waits in (True, False)],
        "side-stream collective": [_side_stream_collective(device, waits) for waits in (True, False)],
    }


def _async_collective(device: torch.device, waits: bool) -> float:
    x = torch.ones(4, device=device)
    dist.all_reduce(torch.ones(1, device=device))
    torch.npu.synchronize()
    work = dist.all_reduce(x, async_op=True)
    if waits:
        work.wait()
    value = _read(x)
    work.wait()
    return value


def _side_stream_collective(device: torch.device, waits: bool) -> float:
    side = torch.npu.Stream()
    x = torch.ones(4, device=device)
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        dist.all_reduce(x)
    if waits:
        torch.npu.current_stream().wait_stream(side)
    value = _read(x)
    torch.npu.synchronize()
    return value


def side_stream_compute(device: torch.device) -> dict[str, list[float]]:
    """The same for a computation on a side stream, and for one that does not wait for the main stream."""

    def joins(waits: bool) -> float:
        side = torch.npu.Stream()
        x = torch.zeros(4, device=device)
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            x.add_(5)
        if waits:
            torch.npu.current_stream().wait_stream(side)
        value = _read(x)
        torch.npu.synchronize()
        return value

    def starts(waits: bool) -> float:
        side = torch.npu.Stream()
        x = torch.zeros(4, device=device)
        torch.npu.synchronize()
        x.add_(5)
        if waits:
            side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            return _read(x)

    def copies_back(waits: bool) -> float:
        x = torch.full((4,), 5.0, device=device)
        back = torch.zeros(4).pin_memory()
        torch.npu.synchronize()
        back.copy_(x, non_blocking=True)
        if waits:
            torch.npu.synchronize()
        value = back[0].item()
        torch.npu.synchronize()
        return value

    ways: dict[str, Callable[[bool], float]] = {
        "join": joins,
        "start": starts,
        "copy to the host": copies_back,
    }
    return {name: [way(True), way(False)] for name, way in ways.items()}


def swapped_collectives(device: torch.device) -> None:
    first, second = torch.ones(4, device=device), torch.ones(4, device=device)
    out = torch.empty(4 * dist.get_world_size(), device=device)
    if dist.get_rank() == 0:
        dist.all_reduce(first)
        dist.all_gather_into_tensor(out, second)
    else:
        dist.all_gather_into_tensor(out, second)
        dist.all_reduce(first)
    torch.npu.synchronize()


def mismatched_counts(device: torch.device) -> None:
    """No synchronization either: reading the result must fail."""
    x = torch.ones(2 + dist.get_rank(), device=device)
    dist.all_reduce(x)
    print(x.sum().item())


def mismatched_dtypes_without_synchronization(device: torch.device) -> None:
    """The watchdog of torch_npu must notice by itself."""
    dist.all_reduce(torch.ones(2, device=device, dtype=torch.float16 if dist.get_rank() else torch.float32))
    time.sleep(20)


def sends_without_receiver(device: torch.device) -> None:
    """Both ranks send first: right only where sends are buffered."""
    x, y = torch.ones(4, device=device), torch.empty(4, device=device)
    peer = 1 - dist.get_rank()
    dist.send(x, peer)
    dist.recv(y, peer)
    torch.npu.synchronize()


def a_rank_dies(device: torch.device) -> None:
    dist.all_reduce(torch.ones(4, device=device))
    torch.npu.synchronize()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    dist.all_reduce(torch.ones(4, device=device))
    torch.npu.synchronize()
