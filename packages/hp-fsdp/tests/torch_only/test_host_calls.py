"""How many calls of Python a unit costs the host in a step whose gathers and reductions are copies between peers.

Where steps are short the host is what they wait for. What runs in a call changes with the machine; how many there are does not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import hp_dtensor
import hp_fsdp.peers
import hp_platform
from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_platform import init_device_mesh
from hp_platform.repeated import MOST_KEPT, RepeatedWork
from hp_platform.testing import World, count_collectives, distributed
from hp_platform.torch._peer_copies import Pull, Push

PYTHON_CALLS_PER_UNIT = 270
"""In our packages, for a unit of four parameters in forward and backward: no more than there were when this was written."""
CALLS_WHERE_WORK_IS_KEPT = 245
"""The same where exchanges that come again are one launch."""
OURS = tuple(str(Path(each.__file__ or "").parent) for each in (hp_dtensor, hp_fsdp, hp_platform))


class Copied:
    """A driver that is given all copies of an exchange, and has nobody to copy from."""

    def __init__(self) -> None:
        self.num_calls = 0

    def run(self, *_: Any) -> bool:
        self.num_calls += 1
        return True


class Memory:
    """Peer memory without peers."""

    def __init__(self, numel: int, dtype: Any, num_ranks: int) -> None:
        self.parts = [torch.zeros(numel, dtype=dtype) for _ in range(num_ranks)]
        self.batches = Copied()

    def of(self, rank: int) -> torch.Tensor:
        return self.parts[rank]

    def copy_each(self, targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        raise AssertionError("all parts are small")

    def pull(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Pull:
        return Pull(self.batches, targets, sources)

    def push(self, places: Sequence[torch.Tensor], parts: Sequence[tuple[int, int]]) -> Push:
        return Push(self.batches, places, parts)

    def barrier(self) -> None:
        """Nobody to wait for."""


class Kept:
    """Work that is launched, and nothing comes of it."""

    def launch(self) -> None:
        """Nobody to copy from."""


class Keeping:
    """A device that keeps all work that has come once, wherever its memory lies."""

    def place(self, tensors: Sequence[torch.Tensor]) -> int:
        return 0

    def layout(self, x: torch.Tensor) -> tuple[object, ...]:
        return x.dtype, x.shape

    def first(self, work: Callable[[], None]) -> None:
        work()

    def record(self, work: Callable[[], None]) -> Kept:
        return Kept()

    def count_writes(self, xs: Sequence[torch.Tensor]) -> None:
        """Nobody asks."""


class Reaching:
    """Devices that reach each other, as far as this rank is told."""

    def __init__(self, patch: pytest.MonkeyPatch, world: World, *, keeps: bool = False) -> None:
        self.memories: list[Memory] = []
        self.kept: list[RepeatedWork] = []
        if keeps:
            handle = type(world.platform.device(world.device_type))
            patch.setattr(handle, "repeated", self._keeping)
        kind = type(world.platform)
        supports = kind.supports
        has = ("peer_memory", "exchange", "coalesced")
        patch.setattr(kind, "supports", lambda p, name, d=None: name in has or supports(p, name, d))
        patch.setattr(kind, "can_coalesce", lambda p, kind: True)
        patch.setattr(hp_fsdp.peers, "peer_memory", self._made)

    def _made(self, numel: int, dtype: Any, device: str, group: Any) -> Memory:
        self.memories.append(Memory(numel, dtype, group.size))
        return self.memories[-1]

    def _keeping(self, most_kept: int = MOST_KEPT, *, makes_products: bool = True) -> RepeatedWork:
        assert not makes_products, "records of copies go one by one"
        self.kept.append(RepeatedWork(Keeping(), most_kept=most_kept))  # type: ignore[arg-type]
        return self.kept[-1]

    @property
    def num_exchanges(self) -> int:
        """Gathers and reductions so far."""
        launched = sum(each.num_launched for each in self.kept)
        return launched + sum(memory.batches.num_calls for memory in self.memories)


class Block(torch.nn.Module):
    """Four parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def step_of(world: World, num_units: int) -> Callable[[], None]:
    mesh = init_device_mesh(world.device_type, (world.size,))
    policy = MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="float32")
    model = torch.nn.Sequential(*(Block() for _ in range(num_units)), torch.nn.Linear(8, 8))
    for block in model[:-1]:
        fully_shard(block, mesh, mp_policy=policy)
    fully_shard(model, mesh, mp_policy=policy)
    x = torch.ones(2, 8)

    def step() -> None:
        model(x).float().sum().backward()
        for parameter in model.parameters():
            parameter.to_local().grad = None  # as nothing of ours does it

    return step


def python_calls(step: Callable[[], None]) -> int:
    """Of functions in our packages."""
    count = 0

    def called(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            count += 1

    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(called)
        try:
            step()
        finally:
            sys.setprofile(None)
    return count


@pytest.mark.parametrize("keeps", [False, True], ids=["started one by one", "kept"])
@distributed(2, backends="torch")
def test_a_unit_costs_the_host_a_bounded_number_of_calls(world: World, keeps: bool) -> None:
    with pytest.MonkeyPatch.context() as patch, count_collectives():
        reaching = Reaching(patch, world, keeps=keeps)
        found = []
        for num_units in (2, 6):
            step = step_of(world, num_units)
            for _ in range(6):  # orders are recorded, what is kept is made
                step()
            before = reaching.num_exchanges
            step()
            assert reaching.num_exchanges - before == 3 * num_units + 2, "two of the root: one gather"
            found.append(min(python_calls(step) for _ in range(3)))  # what is dropped may go in any of them
    per_unit = (found[1] - found[0]) / 4
    assert per_unit <= (CALLS_WHERE_WORK_IS_KEPT if keeps else PYTHON_CALLS_PER_UNIT)
    assert keeps == any(each.num_launched for each in reaching.kept)
