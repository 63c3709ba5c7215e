"""In which order a step of Muon starts things: what travels is under way while matrices are orthogonalised, and the host waits for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest

from hp_dtensor import Shard, distribute_tensor
from hp_optim import Muon
from hp_optim.muon import exchange, pipeline
from hp_optim.muon.step import Step
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed


class Log:
    """What a step does, by batch, in the order in which the host asks for it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self._batches: list[Any] = []
        self.num_host_waits = 0

    def add(self, what: str, batch: Any) -> None:
        if not any(batch is other for other in self._batches):
            self._batches.append(batch)
        self.events.append((what, [batch is other for other in self._batches].index(True)))

    def at(self, what: str, batch: int) -> int:
        """When; it happens once."""
        found = [number for number, event in enumerate(self.events) if event == (what, batch)]
        assert len(found) == 1, (what, batch, self.events)
        return found[0]

    @property
    def num_batches(self) -> int:
        return len(self._batches)


@contextmanager
def logged(world: World) -> Iterator[Log]:
    log, current = Log(), []

    class Coming(exchange.Coming):
        def __init__(self, platform: Any, batch: Any, row: Any, repeated: Any) -> None:
            current.append(("matrices leave", batch))
            super().__init__(platform, batch, row, repeated)

        def wait(self) -> Any:
            log.add("matrices are waited for", self._batch)
            return super().wait()

    class GoingBack(exchange.GoingBack):
        def __init__(self, platform: Any, batch: Any, results: Any, repeated: Any) -> None:
            current.append(("results leave", batch))
            super().__init__(platform, batch, results, repeated)

        def wait(self) -> Any:
            log.add("results are waited for", self._batch)
            return super().wait()

    launched, orthogonalised, apply = exchange.exchange, Step.orthogonalised, Step.apply

    def launch(*args: Any) -> Any:
        work = launched(*args)
        log.add(*current[-1])
        return work

    def iterated(step: Any, batch: Any, stack: Any, x: Any) -> Any:
        log.add("iterated", batch)
        return orthogonalised(step, batch, stack, x)

    def applied(step: Any, batch: Any, results: Any) -> None:
        log.add("applied", batch)
        apply(step, batch, results)

    def host_wait(*_: Any) -> None:
        log.num_host_waits = log.num_host_waits + 1

    handle = world.platform.device(world.device)
    waits = [(type(handle), "synchronize"), (type(handle.new_stream()), "synchronize")]
    waits.append((type(handle.new_event()), "synchronize"))
    with ExitStack() as stack:
        for place, name, value in (
            (pipeline, "Coming", Coming),
            (pipeline, "GoingBack", GoingBack),
            (exchange, "exchange", launch),
            (Step, "orthogonalised", iterated),
            (Step, "apply", applied),
            *((place, name, host_wait) for place, name in waits),
            (world.platform, "to_numpy", host_wait),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        yield log


def parameters(world: World, number: int) -> list[Any]:
    mesh = init_device_mesh(world.device_type, (world.size,))
    found = []
    for seed in range(number):
        values = np.random.default_rng(seed).normal(size=(2, 4 * world.size, 6))
        value, gradient = (
            distribute_tensor(world.platform.tensor(x, "float32", world.device), mesh, [Shard(0)])
            for x in values
        )
        value.requires_grad_(True)
        value.grad = gradient
        found.append(value)
    return found


@distributed(world_size=(2, 3), backends="torch")
def test_the_next_matrices_are_on_their_way_while_the_present_ones_are_orthogonalised(world: World) -> None:
    # A batch has a matrix for every rank.
    optimizer = Muon(parameters(world, 5 * world.size), ns_dtype="float32", memory_cap=1)
    optimizer.step()
    with logged(world) as log:
        optimizer.step()
    last = log.num_batches - 1
    assert last == 4
    for k in range(last + 1):
        assert log.at("matrices leave", k) < log.at("matrices are waited for", k) < log.at("iterated", k)
        assert log.at("iterated", k) < log.at("results leave", k) < log.at("results are waited for", k)
        assert log.at("results are waited for", k) < log.at("applied", k)
        if k < last:
            # Below the iteration of batch k: the next one comes, and the last one goes back and is applied after it has started.
            assert log.at("matrices leave", k + 1) < log.at("matrices are waited for", k)
            assert log.at("iterated", k + 1) < log.at("results are waited for", k)
        if k + 1 < last:
            # Not earlier: there is room for two batches that come.
            assert log.at("iterated", k) < log.at("matrices leave", k + 2)
    assert log.num_host_waits == 0


@distributed(world_size=1, backends="torch")
def test_the_log_sees_waits_of_the_host(world: World) -> None:
    platform = world.platform
    with logged(world) as log:
        platform.device(world.device).new_event().synchronize()
        platform.device(world.device).current_stream().synchronize()
        platform.to_numpy(platform.zeros((1,), "float32", world.device))
    assert log.num_host_waits == 3


class _Stream:
    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: _Stream) -> None:
        self._log.append((self.name, other.name))


def test_a_step_that_fails_leaves_no_stream_at_work_in_memory_of_the_other() -> None:
    log: list[tuple[str, str]] = []
    present, iterations = _Stream("present", log), _Stream("iterations", log)
    platform, devices, batch = mock.Mock(), mock.Mock(), mock.Mock()
    platform.device.return_value.current_stream.return_value = present
    devices.stream.return_value = iterations
    steps = mock.Mock()
    steps.packed.side_effect = ValueError("in the middle")
    with pytest.raises(ValueError, match="in the middle"):
        pipeline.run(platform, [batch, batch], steps, devices)
    assert log == [("present", "iterations"), ("iterations", "present")]
