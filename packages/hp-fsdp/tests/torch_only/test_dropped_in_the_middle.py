"""What is dropped while a side stream works for it leaves no stream behind that writes into memory of others."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_fsdp.streams import Streams
from hp_fsdp.unit import unit_of
from hp_platform.platform import get_platform
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent.parent))
from fsdp_models import Maker, make_mesh

WIDTH = 1024


class _Stream:
    """Of a device that only writes down what its streams wait for."""

    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Any) -> None:
        self.log.append((self.name, other.name))

    def wait_event(self, event: str) -> None:
        self.log.append((self.name, event))

    def record_event(self, event: Any = None) -> str:
        return f"end of {self.name}"


class _Device:
    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.now = _Stream("computation", self.log)
        self._num_made = 0

    def new_stream(self, *, high_priority: bool) -> _Stream:
        self._num_made += 1
        return _Stream(f"side stream {self._num_made}", self.log)

    def current_stream(self) -> _Stream:
        return self.now

    def use_stream(self, stream: _Stream) -> Any:
        return pytest.MonkeyPatch.context()  # any context will do


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    platform, device = get_platform(), _Device()
    # Of the class: pytest would leave the object with attributes of its own, which hide what other tests put into the class.
    monkeypatch.setattr(type(platform), "device", lambda *_: device)
    monkeypatch.setattr(type(platform), "supports", lambda *_: True)
    return Streams(platform, "cpu")


@pytest.mark.parametrize("follows_on", [False, True])
def test_the_computation_waits_for_a_task_that_nobody_waited_for(streams: Streams, follows_on: bool) -> None:
    log = streams.device.log
    task = streams.run(streams.gather, lambda: lambda: None, streams.after_reduce if follows_on else None)
    before = list(log)
    # In the middle of something else's stream, as when a collector of garbage runs.
    streams.device.now = streams.reduce
    del task
    gc.collect()
    end = f"end of {(streams.after_reduce if follows_on else streams.gather).name}"
    assert log == [*before, ("computation", end)]


@pytest.mark.parametrize("fails", ["start", "follow"])
def test_the_computation_waits_for_what_an_error_cuts_short(streams: Streams, fails: str) -> None:
    def fail() -> None:
        raise ValueError("in the middle")

    log = streams.device.log
    with pytest.raises(ValueError, match="in the middle"):
        streams.run(streams.reduce, (lambda: fail) if fails == "follow" else fail, streams.after_reduce)  # type: ignore[arg-type]
    assert log[-2:] == [("computation", streams.reduce.name), ("computation", streams.after_reduce.name)]


def test_a_wait_of_another_stream_does_not_count_for_the_computation(streams: Streams) -> None:
    task = streams.run(streams.gather, lambda: lambda: None)
    streams.device.now = streams.reduce
    task.wait()
    del task
    gc.collect()
    end = f"end of {streams.gather.name}"
    assert streams.device.log[-2:] == [(streams.reduce.name, end), ("computation", end)]


def test_it_does_not_wait_twice(streams: Streams) -> None:
    log = streams.device.log
    task = streams.run(streams.gather, lambda: lambda: None)
    task.wait()
    before = list(log)
    del task
    gc.collect()
    assert log == before


@distributed(world_size=1, backends="cuda")
def test_memory_of_a_model_that_is_dropped_while_it_is_gathered_is_nobodys_until_then(world: World) -> None:
    platform = world.platform
    maker = Maker(world)

    def setup(module: Any) -> None:
        module.unit, module.head = maker.linear(WIDTH, WIDTH), maker.linear(4, WIDTH)

    model = maker.model(setup, lambda module, x, rank: module.head(module.unit(x)))
    # Another dtype, so that one rank has something to gather, too.
    precision = MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="float32")
    mesh = make_mesh(world)
    fully_shard(model.unit, mesh, mp_policy=precision)
    fully_shard(model, mesh, mp_policy=precision)
    x = platform.zeros((2, WIDTH), maker.dtype, world.device)
    model(x, rank=0)  # so that there is a root
    unit = unit_of(model.unit)
    assert unit is not None
    assert unit.context is not None
    busy = torch.ones(4096, 4096, device=world.device)
    gather = unit.context.streams.gather
    torch.cuda.synchronize()
    with torch.cuda.stream(gather):
        for _ in range(100):
            busy = busy @ busy * 0.0
    unit.launch_gather()
    assert not gather.query(), "the gather should still wait behind the products"
    sizes = [platform.storage_nbytes(param.full) for param in unit.params]
    assert sum(sizes) >= WIDTH * WIDTH * 2
    del model, unit
    gc.collect()
    assert not gather.query(), "the model should be gone before its gather"
    others = [torch.full((WIDTH * WIDTH,), 7.0, dtype=torch.bfloat16, device=world.device) for _ in range(4)]
    torch.cuda.synchronize()
    for other in others:
        assert bool((other == 7.0).all())
