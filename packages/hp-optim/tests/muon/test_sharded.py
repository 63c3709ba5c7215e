"""Muon of sharded parameters beside that of one process: any placements, on 1 to 4 ranks, all in one optimizer."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hp_dtensor import RaggedShard, Replicate, Shard, StridedShard, distribute_tensor
from hp_optim import Muon, sinkhorn
from hp_optim.offload.late import TIMINGS, LateTransfers
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parents[1]))
import muon_oracle

STEPS = 3


@dataclass(frozen=True)
class Case:
    """A parameter: its shape, on which mesh it lies, how, and how it is split."""

    shape: tuple[int, ...]
    mesh: str
    placements: tuple[Any, ...]
    rows: tuple[int, ...] = ()
    layout: str | None = None


def meshes(world: World) -> dict[str, DeviceMesh]:
    """One dim of all ranks, two of them in both shapes, one dim of those, and one that lists the ranks backwards."""
    n, kind = world.size, world.device_type
    outer = 2 if n == 4 else n
    wide = init_device_mesh(kind, (outer, n // outer), mesh_dim_names=("a", "b"))
    return {
        "line": init_device_mesh(kind, (n,), mesh_dim_names=("fsdp",)),
        "wide": wide,
        "of wide, a": wide["a"],
        "of wide, b": wide["b"],
        "tall": init_device_mesh(kind, (n // outer, outer), mesh_dim_names=("c", "d")),
        "turned": DeviceMesh(kind, list(reversed(range(n))), mesh_dim_names=("r",)),
    }


def cases(n: int) -> dict[str, Case]:
    inner = n // (2 if n == 4 else n)
    return {
        "rows over all ranks": Case((12, 8), "line", (Shard(0),)),
        "uneven rows": Case((7, 5), "line", (Shard(0),)),
        "fewer rows than ranks": Case((3, 4), "line", (Shard(0),)),
        "one row": Case((1, 6), "line", (Shard(0),)),
        "one column": Case((5, 1), "line", (Shard(0),)),
        "no rows": Case((0, 4), "line", (Shard(0),)),
        "columns": Case((4, 9), "line", (Shard(1),)),
        "replicated": Case((6, 4), "line", (Replicate(),)),
        "rows on a mesh that lists the ranks backwards": Case((5, 4), "turned", (Shard(0),)),
        "rows on a part of the ranks": Case((6, 5), "of wide, b", (Shard(0),)),
        "columns on another part of the ranks": Case((6, 5), "of wide, a", (Shard(1),)),
        "experts on a part of the ranks": Case((3, 5, 4), "of wide, a", (Shard(0),)),
        "replicas of rows": Case((9, 4), "wide", (Replicate(), Shard(0))),
        "replicas of rows, inner": Case((9, 4), "tall", (Shard(0), Replicate())),
        "replicas of columns": Case((4, 7), "tall", (Replicate(), Shard(1))),
        "rows and columns": Case((8, 6), "wide", (Shard(0), Shard(1))),
        "columns and rows": Case((5, 7), "tall", (Shard(1), Shard(0))),
        "rows twice": Case((9, 4), "wide", (Shard(0), Shard(0))),
        "rows twice, the inner mesh dim outside": Case((9, 4), "wide", (StridedShard(0, inner), Shard(0))),
        "columns twice": Case((3, 10), "tall", (Shard(1), Shard(1))),
        "experts over ranks": Case((5, 4, 6), "line", (Shard(0),)),
        "experts by rows": Case((3, 6, 4), "line", (Shard(1),)),
        "experts over ranks and columns": Case((4, 3, 6), "wide", (Shard(0), Shard(2))),
        "replicas of experts": Case((4, 3, 5), "wide", (Replicate(), Shard(0))),
        "one expert": Case((1, 4, 3), "line", (Shard(0),)),
        "convolution by channels": Case((6, 2, 3, 3), "line", (Shard(0),)),
        "convolution by inner channels": Case((4, 5, 3, 1), "line", (Shard(1),)),
        "convolution of one dim": Case((6, 2, 3), "line", (Shard(0),), layout="convolution"),
        "depthwise": Case((6, 1, 4), "line", (Shard(0),)),
        "fused": Case((12, 5), "line", (Shard(0),), rows=(6, 3, 3)),
        "fused by columns": Case((8, 6), "line", (Shard(1),), rows=(4, 2, 2)),
        "heads": Case((12, 4), "wide", (Replicate(), Shard(0)), rows=(3, 3, 3, 3)),
        "rows on a part of the ranks, again": Case((7, 4), "of wide, b", (Shard(0),)),
        "ragged runs": Case((6, 4), "line", (RaggedShard((0, 1), (*(1,) * (n - 1), 24 - (n - 1))),)),
        "ragged rows, one rank has none": Case((6, 4), "line", (RaggedShard((0,), (0, *(1,) * (n - 1)) if n in (2, 3, 4) else (1,)),)),
        "ragged experts": Case((3, 4, 2), "line", (RaggedShard((0, 1), (*(2,) * (n - 1), 12 - 2 * (n - 1))),)),
    }  # fmt: skip


def arrays(case: Case, number: int, step: int) -> np.ndarray:
    return np.random.default_rng([number, step]).normal(size=case.shape)


def cut_of(case: Case) -> Any:
    if case.layout == "convolution":
        return lambda shape: [(...,)]
    return muon_oracle.rows(*case.rows) if case.rows else muon_oracle.blocks


class Twins:
    """The cases as parameters of one optimizer, and as arrays of the oracle."""

    def __init__(
        self, world: World, dtype: str, kind: Any = Muon, transform: Any = None, **options: Any
    ) -> None:
        """``transform``: the oracle's ``ns_transform_fn``."""
        self.world, self.dtype = world, dtype
        self.platform = world.platform
        self.meshes, self.cases = meshes(world), cases(world.size)
        if not world.platform.supports("float64_compute", world.device):
            dtype = self.dtype = "float32"
        self.params = {
            name: self.placed(name, arrays(case, i, 0)) for i, (name, case) in enumerate(self.cases.items())
        }
        for parameter in self.params.values():
            parameter.requires_grad_(True)
        self.optimizer = kind(self.params.items(), split=self.rule, ns_dtype=self.dtype, **options)
        known = ("lr", "weight_decay", "momentum", "nesterov", "ns_steps", "scale")
        self.oracle = muon_oracle.Muon(
            {name: arrays(case, i, 0) for i, (name, case) in enumerate(self.cases.items())},
            cut={name: cut_of(case) for name, case in self.cases.items()},
            dtype=self.dtype,
            transform=transform,
            **{key: value for key, value in options.items() if key in known},
        )

    def rule(self, name: str, shape: tuple[int, ...]) -> dict[str, Any] | None:
        case = self.cases[name]
        found: dict[str, Any] = {"rows": list(case.rows)} if case.rows else {}
        return {**found, "layout": case.layout} if case.layout else found or None

    def placed(self, name: str, value: np.ndarray) -> Any:
        case = self.cases[name]
        tensor = self.platform.tensor(value, self.dtype, self.world.device)
        return distribute_tensor(tensor, self.meshes[case.mesh], case.placements)

    def step(self, step: int, without: Collection[str] = ()) -> None:
        grads = {
            name: arrays(case, i, step)
            for i, (name, case) in enumerate(self.cases.items())
            if name not in without
        }
        for name, parameter in self.params.items():
            parameter.grad = self.placed(name, grads[name]) if name in grads else None
        self.optimizer.step()
        self.oracle.step({name: g.astype(self.dtype) for name, g in grads.items()})

    def whole(self, x: Any) -> np.ndarray:
        return self.platform.to_numpy(x.full_tensor())

    def check(self, tolerance: float) -> None:
        platform = self.platform
        for name, parameter in self.params.items():
            found = self.whole(platform.detach(parameter))
            assert np.abs(found - self.oracle.params[name]).max(initial=0.0) <= tolerance, name
            momentum = self.optimizer.state[parameter]["momentum_buffer"]
            assert momentum.placements == parameter.placements
            assert np.array_equal(self.whole(momentum), self.oracle.momentum[name]), name


@distributed(world_size=[1, 2, 3, 4])
def test_in_any_placement_momentum_is_that_of_one_process_to_the_bit_and_updates_to_rounding(
    world: World,
) -> None:
    twins = Twins(world, "float64")
    for step in range(1, 1 + STEPS):
        twins.step(step)
    twins.check(1e-12 if twins.dtype == "float64" else 1e-6)


@distributed(world_size=[2, 4])
def test_updates_in_float32_are_those_of_one_process_to_rounding(world: World) -> None:
    twins = Twins(world, "float32", ns_steps=5, lr=1.0, weight_decay=0.0)
    twins.step(1)
    # Of parameters and updates of size 1, beside numpy's products in float32; measured below 6e-7.
    twins.check(1e-6)


@distributed(world_size=[1, 3])
def test_twenty_steps_of_newton_schulz_plain_momentum_and_small_batches(world: World) -> None:
    twins = Twins(world, "float64", ns_steps=20, nesterov=False, momentum=0.5, memory_cap=500)
    for step in range(1, 1 + STEPS):
        twins.step(step)
    twins.check(1e-12 if twins.dtype == "float64" else 1e-5)


@distributed(world_size=3)
def test_parameters_may_be_left_out_of_some_steps(world: World) -> None:
    twins = Twins(world, "float64")
    names = list(twins.cases)
    for step, left_out in enumerate((names[::3], names[1::2], [], names[::3], names[5:]), 1):
        twins.step(step, without=left_out)
    twins.check(1e-12 if twins.dtype == "float64" else 1e-6)


@distributed(world_size=[2, 3])
def test_a_function_of_whole_matrices_may_take_the_place_of_the_iteration(world: World) -> None:
    platform = world.platform

    def polar(stack: Any) -> Any:
        found = [muon_oracle.polar(matrix) for matrix in platform.to_numpy(stack)]
        return platform.tensor(np.stack(found), stack.dtype, platform.device_of(stack))

    options: dict[str, Any] = {"memory_cap": 2000, "scale": lambda rows, cols: 0.2 * cols}
    for function, oracle in ((polar, muon_oracle.polar), (sinkhorn(3), lambda x: muon_oracle.sinkhorn(x, 3))):
        twins = Twins(world, "float64", transform=oracle, ns_transform_fn=function, **options)
        names = list(twins.cases)
        for step, left_out in enumerate(([], names[::4], []), 1):
            twins.step(step, without=left_out)
        # In float32 the smallest singular values, about 0.1, and thin rows enlarge rounding of the momentum.
        twins.check(1e-12 if twins.dtype == "float64" else 1e-5)


@distributed(world_size=[1, 2, 3, 4])
def test_momentum_on_the_host_gives_the_same_bits(world: World) -> None:
    kinds = [Muon]
    if world.platform.supports("write_into_view", world.device):
        kinds.extend(type("Muon", (Muon,), {"MAKE_TRANSFERS": staticmethod(timing)}) for timing in TIMINGS)
    # Some batches have a few matrices, and some parameters stand in several of them.
    beside = Twins(world, "float64", memory_cap=2000)
    others = [Twins(world, "float64", kind, memory_cap=2000, offload_state=True) for kind in kinds]
    names = list(beside.cases)
    for step, left_out in enumerate(([], names[::3], []), 1):
        for twins in (beside, *others):
            twins.step(step, without=left_out)
    for twins in others:
        transfers = twins.optimizer._memory.transfers(world.device)
        if isinstance(transfers, LateTransfers):
            assert transfers.num_waiting == 0
            assert transfers.nbytes["fetch"] >= transfers.nbytes["store"] > 0
        for name, parameter in twins.params.items():
            momentum, other = (
                each.optimizer.state[each.params[name]]["momentum_buffer"] for each in (twins, beside)
            )
            local = momentum.to_local()
            assert transfers is None or transfers.is_on_host(local) or 0 in local.shape
            for a, b in ((parameter, beside.params[name]), (momentum, other)):
                assert np.array_equal(twins.whole(a.detach()), beside.whole(b.detach())), name
