"""A call through the platform costs no more than the framework's own: its functions are bound once, at construction."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from bench import memory
from bench.case import Better, Case, Measure, Sample

# Small tensors, so that the call and not the arithmetic is measured.
NUM_ELEMENTS = 8
NUM_CALLS = 20_000
# The fastest of a few repetitions: on a busy machine all others are longer by what was not ours.
NUM_REPEATS = 5

Call = Callable[[], object]


def _side(build: Callable[[], Call]) -> Callable[[], AbstractContextManager[Measure]]:
    @contextmanager
    def side() -> Iterator[Measure]:
        call = build()
        yield lambda: _measure(call)

    return side


def _measure(call: Call) -> Sample:
    known = memory.reset_host_peak()
    best = min(_seconds(call) for _ in range(NUM_REPEATS))
    return Sample(best / NUM_CALLS * 1e6, memory.host_peak_bytes() if known else None)


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    for _ in range(NUM_CALLS):
        call()
    return time.perf_counter() - start


def _tensor() -> Any:
    import torch

    return torch.ones(NUM_ELEMENTS)


def _platform() -> Any:
    import torch  # noqa: F401 -- the platform in use is the one already imported

    from hp_platform import get_platform

    return get_platform()


def _platform_cat() -> Call:
    platform, xs = _platform(), [_tensor(), _tensor()]
    return lambda: platform.cat(xs)


def _torch_cat() -> Call:
    import torch

    xs = [_tensor(), _tensor()]
    return lambda: torch.cat(xs)


def _platform_add_() -> Call:
    platform, x, y = _platform(), _tensor(), _tensor()
    return lambda: platform.add_(x, y)


def _torch_add_() -> Call:
    x, y = _tensor(), _tensor()
    return lambda: x.add_(y)


CASES = tuple(
    Case(
        name=f"platform-{name}",
        summary=f"one call of {name} on {NUM_ELEMENTS} elements through the platform",
        ours=_side(ours),
        peer=_side(peer),
        peer_name=f"torch {name}",
        unit="us/call",
        better=Better.LOWER,
        goal=1.05,
    )
    for name, ours, peer in (("cat", _platform_cat, _torch_cat), ("add_", _platform_add_, _torch_add_))
)
