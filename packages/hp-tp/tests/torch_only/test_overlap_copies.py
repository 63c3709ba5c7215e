"""Products beside copies in peer memory, with threads for ranks and plain tensors for memory: what must hold in any timing."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import hp_platform.halves
import hp_platform.peers
from hp_dtensor.transport import Cut
from hp_platform import get_platform
from hp_platform.group import ProcessGroup
from hp_platform.testing import World, count_collectives, distributed
from hp_tp.overlap import OverlapPolicy, all_gather_matmul, matmul_reduce_scatter
from hp_tp.overlap.copies import MAX_COPIES, steps_of
from hp_tp.overlap.matrices import Matrices

sys.path.insert(0, str(Path(__file__).parent.parent))
from test_overlap import LAYOUTS, Numbers, check, cut_of, leaves, local, near, parallel, part, plain

CUT = OverlapPolicy(min_copied_nbytes=0, min_product=0)
SOME = OverlapPolicy(min_copied_nbytes=0, min_product=12)
UNCUT = OverlapPolicy(min_copied_nbytes=0, min_product=10_000)
POLICIES = {"cut": CUT, "some cut": SOME, "uncut": UNCUT}


class Machine:
    """Memory of all ranks, and where they meet. A barrier lets each go on at a time of its own."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.meeting = threading.Barrier(num_ranks, timeout=30)
        self.lock = threading.Lock()
        self.made: dict[int, list[torch.Tensor]] = {}
        self.counts = [0] * num_ranks
        self.taken: list[int] = []

    def memory(self, numel: int, dtype: torch.dtype, device: str, group: ProcessGroup) -> PeerMemory:
        number = self.counts[group.rank]
        self.counts[group.rank] = number + 1
        with self.lock:
            if number not in self.made:
                self.taken.append(numel)
                self.made[number] = [
                    torch.full((numel,), float("nan"), dtype=dtype) for _ in range(self.num_ranks)
                ]
        self.meeting.wait()
        return PeerMemory(self, self.made[number], group.rank)


class PeerMemory:
    def __init__(self, machine: Machine, parts: list[torch.Tensor], rank: int) -> None:
        self.machine, self.parts, self.random = machine, parts, Random(rank)

    def of(self, rank: int) -> torch.Tensor:
        return self.parts[rank]

    def copy_each(self, targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        for target, value in zip(targets, values, strict=True):
            assert target.is_contiguous()
            assert value.is_contiguous()
            assert target.dtype == value.dtype
            assert target.shape == value.shape
            with torch.no_grad():
                target.copy_(value)
            self.pause()

    def pull(self, *_: Any) -> Any:
        raise AssertionError("copies are made one by one")

    push = pull

    def barrier(self) -> None:
        self.pause()
        self.machine.meeting.wait()

    def pause(self) -> None:
        if self.random.random() < 0.2:
            time.sleep(self.random.random() * 1e-3)


@pytest.fixture(autouse=True)
def _reaching(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(get_platform())
    supports = kind.supports
    monkeypatch.setattr(
        kind,
        "supports",
        lambda p, name, d=None: (name == "peer_memory" and d == "cpu") or supports(p, name, d),
    )


class LateStream:
    """A queue whose work is done as late as it may be: when somebody waits for it."""

    def __init__(self) -> None:
        self.queued: list[Callable[[], None]] = []
        self.done = 0

    def wait_stream(self, other: Any) -> None:
        """The computation runs at once, so it is over."""

    def record_event(self) -> tuple[LateStream, int]:
        return self, len(self.queued)

    def run_until(self, end: int) -> None:
        while self.done < end:
            step, self.done = self.queued[self.done], self.done + 1
            step()


class LateDevice:
    """Of one rank: a computation that runs at once, and a side stream that runs late."""

    def __init__(self, rank: int) -> None:
        self.name = f"late:{rank}:{next(NUMBERS)}"  # side streams are kept by this
        self.side, self.on_side = LateStream(), False
        self.missing = get_platform().device("cpu").missing

    def current(self) -> str:
        return self.name

    def new_stream(self, high_priority: bool) -> LateStream:
        return self.side

    def current_stream(self) -> Any:
        assert not self.on_side
        return SimpleNamespace(wait_event=lambda mark: mark[0].run_until(mark[1]))

    @contextmanager
    def use_stream(self, stream: LateStream) -> Iterator[None]:
        self.on_side = True
        try:
            yield
        finally:
            self.on_side = False

    def synchronize(self) -> None:
        self.side.run_until(len(self.side.queued))


OF_THREAD, NUMBERS = threading.local(), count()


def queued_late(patch: pytest.MonkeyPatch) -> None:
    """Let what is done on the side stream (copies, barriers, sums) be done late."""
    kind = type(get_platform())
    supports, device = kind.supports, kind.device

    def late(run: Callable[..., Any]) -> Callable[..., Any]:
        def queue(*arguments: Any) -> Any:
            of = OF_THREAD.device
            if not of.on_side:
                return run(*arguments)
            of.side.queued.append(lambda: run(*arguments))
            return None

        return queue

    patch.setattr(kind, "supports", lambda p, name, d=None: name == "streams" or supports(p, name, d))
    patch.setattr(kind, "device", lambda p, name: getattr(OF_THREAD, "device", None) or device(p, name))
    patch.setattr(kind, "reduce_rows_", late(kind.reduce_rows_))
    patch.setattr(PeerMemory, "copy_each", late(PeerMemory.copy_each))
    patch.setattr(PeerMemory, "barrier", late(PeerMemory.barrier))


def on_threads(num_ranks: int, run: Callable[[Any], None]) -> Machine:
    """``run(world)`` of every rank at the same time. Its group has no backend: what is not copied fails."""
    machine = Machine(num_ranks)
    errors: list[BaseException] = []

    def rank_runs(rank: int) -> None:
        group = ProcessGroup(tuple(range(num_ranks)), rank, "gloo", timedelta(seconds=30), native=object())
        world = SimpleNamespace(
            platform=get_platform(), group=group, rank=rank, size=num_ranks, device="cpu", device_type="cpu"
        )
        OF_THREAD.device = None
        if get_platform().supports("streams", "cpu"):
            OF_THREAD.device = LateDevice(rank)
        try:
            run(world)
            if OF_THREAD.device is not None:
                assert OF_THREAD.device.side.done == len(OF_THREAD.device.side.queued), "nobody waited for it"
        except BaseException as error:
            errors.append(error)
            machine.meeting.abort()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hp_platform.peers, "peer_memory", machine.memory)
        patch.setattr(hp_platform.halves, "told", lambda text, group: [machine.meeting.wait()])
        threads = [threading.Thread(target=rank_runs, args=(rank,)) for rank in range(num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return machine


@pytest.fixture(params=["at once", "late"])
def _queued(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the side stream does its work: the earliest and the latest time there is."""
    if request.param == "late":
        queued_late(monkeypatch)


@pytest.mark.usefixtures("_queued")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_values_and_gradients_are_those_of_one_process(num_ranks: int, policy: str) -> None:
    def run(world: Any) -> None:
        for layout in LAYOUTS:
            check(world, layout, POLICIES[policy])

    on_threads(num_ranks, run)


@pytest.mark.usefixtures("_queued")
@pytest.mark.parametrize("policy", POLICIES)
def test_features_may_be_dealt_unevenly_and_weights_may_be_frozen(policy: str) -> None:
    def run(world: Any) -> None:
        for layout in ("rows", "prime rows", "sequences"):
            for hidden in (1, 3, 7):
                check(world, layout, POLICIES[policy], hidden)
            check(world, layout, POLICIES[policy], frozen=("first", "second", "third", "bias", "last"))
            check(world, layout, POLICIES[policy], frozen=("x",))
            check(world, layout, POLICIES[policy], frozen=("first", "last"))

    on_threads(3, run)


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_may_descend_along_the_mesh_dim(policy: str) -> None:
    def run(world: Any) -> None:
        for layout in ("rows", "prime rows", "sequences"):
            check(world, layout, POLICIES[policy], is_turned=True)

    on_threads(3, run)


@pytest.mark.usefixtures("_queued")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_many_turns_give_the_same_bits_every_time(dtype: torch.dtype) -> None:
    """Sums are made in the ranks' order, whoever comes first."""
    rounds = 12

    def run(world: Any) -> None:
        platform = world.platform
        cut = cut_of(world, 12, 0)
        values = local(Numbers.of(world, (12,), 6).values, cut)
        found = []
        for _ in range(rounds):
            t = {
                name: x.detach().to(dtype).requires_grad_(x.requires_grad)
                for name, x in leaves(world, values).items()
            }
            y = parallel(world, t, cut, CUT)
            platform.backward([platform.sum(y * t["loss"])])
            found.append([y.detach(), *(t[name].grad for name in ("x", "first", "second", "third", "last"))])
        for again in found[1:]:
            for got, expected in zip(again, found[0], strict=True):
                assert torch.equal(got, expected)

    on_threads(4, run)


def test_sums_of_narrow_rows_are_rounded_once() -> None:
    """bfloat16 has 8 bits: 256 + 1 + 1 + 1 rounded after each addition stays 256; the sum is 259, which rounds to 260."""

    def run(world: Any) -> None:
        cut = cut_of(world, 4, 0)
        x = torch.full((4, 1), 256.0 if world.rank == 0 else 1.0, dtype=torch.bfloat16)
        found = matmul_reduce_scatter(x, torch.ones(1, 1, dtype=torch.bfloat16), cut, policy=CUT)
        assert found.tolist() == [[260.0]]

    on_threads(4, run)


def test_copies_count_as_the_collectives_that_they_stand_for() -> None:
    def run(world: Any) -> None:
        cut = cut_of(world, 12, 0)
        mine = leaves(world, local(Numbers.of(world, (12,), 8).values, cut))
        y = parallel(world, mine, cut, CUT)
        world.platform.backward([world.platform.sum(y * mine["loss"])])

    with count_collectives() as counted:
        on_threads(2, run)
    counted.assert_counts(
        all_gather=4, reduce_scatter=4
    )  # both ranks are in this process; forward and backward
    assert counted.nbytes("all_gather") == counted.nbytes("reduce_scatter") == 2 * 12 * (5 + 4) * 8


def test_two_layers_of_a_group_share_its_memory_and_the_larger_one_replaces_it() -> None:
    def run(world: Any) -> None:
        check(world, "rows", CUT)
        check(world, "rows", UNCUT)
        (halves,) = world.group.halves.values()
        check(world, "sequence first", CUT)
        (larger,) = world.group.halves.values()
        assert larger.numel > halves.numel
        check(world, "rows", CUT)
        assert list(world.group.halves.values()) == [larger]

    machine = on_threads(2, run)
    # Two halves of two rows each; the largest piece is (6, 5) and then (6, 3, 5), and a row has a multiple of 64.
    assert machine.taken == [2 * 2 * 64, 2 * 2 * 128]


def test_what_does_not_fit_goes_by_collectives() -> None:
    def run(world: Any) -> None:
        for policy, lead, dim in (
            (OverlapPolicy(min_copied_nbytes=0, max_peer_nbytes=100, min_nbytes=0), (12,), 0),
            (CUT, (MAX_COPIES + 1, 4), 1),
        ):
            mine = leaves(world, local(Numbers.of(world, lead, 6).values, cut_of(world, lead[dim], dim)))
            with pytest.raises((RuntimeError, AttributeError, TypeError)):  # the group has no backend
                all_gather_matmul(mine["x"], [mine["first"]], cut_of(world, lead[dim], dim), policy=policy)
        assert not world.group.halves

    on_threads(2, run)


def test_second_derivatives_are_those_of_one_process() -> None:
    def run(world: Any) -> None:
        platform = world.platform
        names = ("x", "first", "last")
        for layout in ("rows", "prime rows", "sequences"):
            lead, dim = LAYOUTS[layout]
            numbers, cut = Numbers.of(world, lead, 6).values, cut_of(world, lead[dim], dim)

            def second(t: dict[str, Any], y: Any) -> list[Any]:
                grads = platform.grad(
                    [platform.sum(y * y * t["loss"])], [t[name] for name in names], create_graph=True
                )
                total = sum((platform.sum(grad * grad) for grad in grads), torch.zeros(()))
                return list(platform.grad([total], [t[name] for name in names]))

            whole, mine = leaves(world, numbers), leaves(world, local(numbers, cut))
            expected = second(
                whole,
                platform.linear(platform.silu(platform.linear(whole["x"], whole["first"])), whole["last"]),
            )
            (y,), _ = all_gather_matmul(mine["x"], [mine["first"]], cut, policy=CUT)
            got = second(mine, matmul_reduce_scatter(platform.silu(y), mine["last"], cut, policy=CUT))
            known = {name: x.detach().numpy() for name, x in zip(names, expected, strict=True)}
            for name, grad in zip(names, got, strict=True):
                near(world, grad, local(known, cut)[name], f"second derivative by {name}, {layout}")

    on_threads(2, run)


def test_without_recording_and_in_inference_mode_values_are_the_same() -> None:
    def run(world: Any) -> None:
        lead, dim = LAYOUTS["rows"]
        numbers, cut = Numbers.of(world, lead, 6).values, cut_of(world, lead[dim], dim)
        expected = plain(world.platform, leaves(world, numbers)).detach().numpy()
        mine = leaves(world, local(numbers, cut))
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            with mode():
                got = parallel(world, mine, cut, CUT)
            near(world, got, part(expected, dim, cut.index, world.size), mode.__name__)

    on_threads(2, run)


@pytest.mark.parametrize("policy", POLICIES)
@distributed(world_size=(2, 4), backends="cuda")
def test_gpus_copy_what_collectives_would_move(world: World, policy: str) -> None:
    for layout in LAYOUTS:
        check(world, layout, POLICIES[policy])
        check(world, layout, POLICIES[policy], frozen=("first", "second", "third", "bias", "last"))
    assert world.group is not None
    if world.platform.peer_domain(world.device) is not None:
        assert any(halves is not None for halves in world.group.halves.values())


def test_other_ranks_come_neighbour_first_and_small_products_together() -> None:
    def rows(sizes: tuple[int, ...], index: int) -> Matrices:
        places = tuple(range(len(sizes)))
        return Matrices.of((sum(sizes), 3), Cut(object(), places, index, 0, sizes))  # type: ignore[arg-type]

    def steps(of: Matrices, min_product: int) -> list[list[int]]:
        return steps_of(of, 10, OverlapPolicy(min_product=min_product))

    assert steps(rows((4, 4, 4, 4), 1), 40) == [[2], [3], [0]]
    assert steps(rows((5, 5, 5, 5), 1), 50) == [[2], [3], [0]]
    assert steps(rows((4, 8, 4, 4), 1), 60) == [[2, 3], [0]]
    assert steps(rows((4, 20, 4, 4), 1), 200) == [[2, 3, 0]]
    assert steps(rows((4, 4, 4, 4), 1), 41) == []
    assert steps(rows((0, 0), 0), 0) == [[1]]
    assert rows((4, 4, 0, 4), 1).ranges([2, 3, 0]) == [(0, 4), (8, 4)]


def test_numbers_of_the_policy_have_bounds() -> None:
    with pytest.raises(ValueError, match="OverlapPolicy: min_product is 0 or more, got -1"):
        OverlapPolicy(min_product=-1)
    assert not OverlapPolicy(gather_by="sends", min_copied_nbytes=0).copies(10)
    assert np.all([OverlapPolicy(min_copied_nbytes=8).copies(n) == (n >= 8) for n in (0, 7, 8, 9)])
