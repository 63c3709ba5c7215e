"""Which stream waits for what at a door whose products are put off: nobody before its result is needed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hp_platform import get_platform
from hp_platform.group import ProcessGroup
from hp_platform.testing import World, distributed
from hp_tp.overlap.side_stream import _side_stream
from hp_tp.styles import put_off

sys.path.insert(0, str(Path(__file__).parent))
from test_overlap_dropped import Device, device, take_time

assert device is not None  # a fixture
WIDTH = 64


def behind_a_door(where: str, at_the_weight: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A result of a linear layer behind the door of a group that sends nothing; its input, and its weight with a hook."""
    x, weight = (torch.ones(WIDTH, WIDTH, device=where, requires_grad=True) for _ in range(2))
    weight.register_hook(at_the_weight)
    group = ProcessGroup((0, 1), 0, "gloo", timedelta(seconds=30), native=object())
    whole = put_off._opened(x, put_off._Sum(group), None)
    with patch.object(put_off, "is_dtensor", lambda parameter: parameter is None):
        y = put_off.linear(whole, weight, None, None)
    assert y.grad_fn is not None
    return y, x, weight


@contextmanager
def reducing_by(reduce: Any) -> Iterator[None]:
    with patch.object(put_off.collectives, "all_reduce", reduce):
        yield


def test_the_computation_waits_for_the_collective_behind_the_product_for_the_weight(device: Device) -> None:
    def at_the_weight(_: Any) -> None:
        device.log.append(("product", "weight"))

    y, x, _ = behind_a_door("cpu", at_the_weight)
    with reducing_by(lambda x, *_, **__: device.log.append(("collective", device.now.name))):
        y.sum().backward()
    assert x.grad is not None
    assert device.log == [
        ("side", "computation"),
        ("collective", "side"),
        ("computation", "side 1"),  # the event before the collective: it is to go first
        ("product", "weight"),
        ("computation", "side 2"),
    ]


def test_a_product_that_fails_leaves_no_collective_behind(device: Device) -> None:
    def at_the_weight(_: Any) -> None:
        raise RuntimeError("no memory")

    def fails() -> None:
        y, *_ = behind_a_door("cpu", at_the_weight)
        with reducing_by(lambda x, *_, **__: None):
            y.sum().backward()

    with pytest.raises(RuntimeError, match="no memory"):
        fails()
    torch.ones(
        1, requires_grad=True
    ).sum().backward()  # torch's engine keeps nodes that were ready until it runs again
    gc.collect()
    assert _side_stream(device).num_events == 2
    assert device.log == [
        ("side", "computation"),
        ("computation", "side 1"),
        ("computation", "side 2"),  # when the graph is dropped
    ]


@distributed(world_size=1, backends="cuda")
def test_the_product_for_the_weight_runs_while_the_collective_does(world: World) -> None:
    side = _side_stream(get_platform().device(world.device))
    found: list[tuple[bool, bool]] = []

    def at_the_weight(_: Any) -> None:
        found.append((torch.cuda.current_stream() == computation, side.query()))
        event = torch.cuda.current_stream().record_event()
        event.synchronize()  # the product is over
        found.append((event.query(), side.query()))

    def reduce(x: torch.Tensor, *_: Any, **__: Any) -> None:
        take_time(x)

    for _ in range(2):  # so that nothing is made or compiled for the first time
        found.clear()
        computation = torch.cuda.current_stream()
        y, x, weight = behind_a_door(world.device, at_the_weight)
        with reducing_by(reduce):
            y.sum().backward()
        torch.cuda.synchronize()
        assert bool((weight.grad == WIDTH).all())
        assert bool((x.grad == WIDTH).all())
    assert found == [(True, False), (True, False)]
