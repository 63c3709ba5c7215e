"""Dropout whose mask depends on no sharding costs about what torch's own costs, forward and backward, on a GPU.

Several dropouts in a row, as layers have them, share one backward pass; ``dropout-alone`` has one. There the host counts: a
backward pass begins by waking the thread of autograd, in which Python is slow at first, and a kernel takes 60 microseconds.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from bench.case import Better, Case, Measure, Sample

# The activations of a layer of 4096 at 8192 tokens on cuda; few enough for a host otherwise.
SHAPE, SMALL_SHAPE = (8192, 4096), (256, 1024)
P = 0.1
NUM_CALLS, NUM_REPEATS = 20, 5

Call = Callable[[Any], Any]


def _side(build: Callable[[], Call], length: int) -> Callable[[], AbstractContextManager[Measure]]:
    @contextmanager
    def side() -> Iterator[Measure]:
        import torch

        on_gpu = torch.cuda.is_available()
        device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
        x = torch.randn(SHAPE if on_gpu else SMALL_SHAPE, device=device, dtype=dtype, requires_grad=True)
        gradient, call = torch.ones_like(x), build()

        def calls(y: Any) -> Any:
            for _ in range(length):
                y = call(y)
            return y

        yield lambda: _measure(calls, x, gradient, length)

    return side


def _measure(call: Call, x: Any, gradient: Any, length: int) -> Sample:
    import torch

    def wait() -> None:
        if x.is_cuda:
            torch.cuda.synchronize()

    def seconds() -> float:
        wait()
        start = time.perf_counter()
        for _ in range(NUM_CALLS):
            x.grad = None
            call(x).backward(gradient)
        wait()
        return time.perf_counter() - start

    seconds()  # kernels are compiled, memory is taken
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    best = min(seconds() for _ in range(NUM_REPEATS))
    peak = torch.cuda.max_memory_allocated() if x.is_cuda else None
    return Sample(best / (NUM_CALLS * length) * 1e6, peak)


def _ours() -> Call:
    import torch  # noqa: F401 -- the platform in use is the one already imported

    from hp_dtensor import random

    return lambda x: random.dropout(x, P)


def _torch() -> Call:
    import torch

    return lambda x: torch.nn.functional.dropout(x, P)


def _case(name: str, length: int) -> Case:
    return Case(
        name=name,
        summary=f"forward and backward of dropout, {length} in a row, of {SHAPE} in bfloat16 on cuda "
        f"({SMALL_SHAPE} in float32 without it)",
        ours=_side(_ours, length),
        peer=_side(_torch, length),
        peer_name="torch dropout",
        unit="us/call",
        better=Better.LOWER,
        goal=1.2,
    )


CASES = (_case("dropout", 8), _case("dropout-alone", 1))
