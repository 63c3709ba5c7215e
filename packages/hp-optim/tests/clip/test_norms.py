"""Norms and clipping against the full gradients, for every way in which gradients lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from hp_dtensor import DTensor, Partial, RaggedShard, Replicate, Shard, StridedShard, distribute_tensor
from hp_optim import clip_grad_norm_, get_grad_norm
from hp_platform import DeviceMesh, collectives, init_device_mesh
from hp_platform.testing import World, count_collectives, distributed

NORM_TYPES = (0, 1, 2, 3, 0.7, np.inf, -np.inf)
SHAPES = [(5, 3), (1, 4), (7, 6), (2, 3, 4)]
"""With 2, 3 and 4 ranks: even, uneven and empty pieces along each dim."""
MAX_NORM = 0.37


def dtype_of(world: World) -> str:
    return "float64" if world.platform.supports("float64_compute", world.device) else "float32"


def tolerance(world: World) -> float:
    """Sums of some hundred positive numbers in another order: some units in the last place. Powers of 0.7 and 3 lose a few more."""
    return 1e-12 if dtype_of(world) == "float64" else 1e-5


@dataclass
class Twins:
    """Parameters as they lie, and the full gradient of each."""

    world: World
    parameters: list[Any] = field(default_factory=list)
    full: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(11)

    def tensor(self, values: np.ndarray) -> Any:
        return self.world.platform.tensor(values, dtype_of(self.world), self.world.device)

    def gradient(self, shape: tuple[int, ...]) -> np.ndarray:
        values = self.random.normal(size=shape)
        # -inf norms must see a smallest magnitude that is not everybody's, 0 norms some zeros.
        values.reshape(-1)[:: 1 + values.size // 2] = 0.0 if self.random.random() < 0.4 else 0.01
        return values

    def plain(self, shape: tuple[int, ...] = (3, 2)) -> Any:
        platform, values = self.world.platform, self.gradient(shape)
        parameter = platform.parameter(self.tensor(np.ones(shape)))
        platform.set_grad(parameter, self.tensor(values))
        return self._add(parameter, values)

    def placed(self, mesh: DeviceMesh, placements: list[Any], shape: tuple[int, ...]) -> Any:
        """A DTensor with a gradient that lies as it does."""
        values = self.gradient(shape)
        parameter = distribute_tensor(self.tensor(np.ones(shape)), mesh, placements).requires_grad_()
        parameter.grad = distribute_tensor(self.tensor(values), mesh, placements)
        return self._add(parameter, values)

    def partial(self, mesh: DeviceMesh, placements: list[Any], shape: tuple[int, ...] = (5, 3)) -> Any:
        """A replicated DTensor whose ``main_grad`` waits for a reduction along the dims that say so."""
        values = self.gradient(shape)
        parameter = distribute_tensor(self.tensor(np.ones(shape)), mesh, [Replicate()] * mesh.ndim)
        piece = [Replicate() if isinstance(p, Partial) else p for p in placements]
        local = distribute_tensor(self.tensor(values), mesh, piece).to_local()
        for dim, placement in enumerate(placements):
            at, size = mesh.get_local_rank(dim), mesh.size(dim)
            if placement.is_partial("sum"):
                local = local * self.tensor(np.array((1 + at) / (size * (size + 1) / 2)))
            elif placement.is_partial("avg"):
                local = local * self.tensor(np.array((1 + at) / ((size + 1) / 2)))
            elif placement.is_partial("max") and at > 0:
                local = local - at
        parameter.main_grad = DTensor.from_local(local, mesh, placements, shape=shape)
        return self._add(parameter.requires_grad_(), values)

    def _add(self, parameter: Any, values: np.ndarray) -> Any:
        self.parameters.append(parameter)
        self.full.append(values)
        return parameter

    # ------------------------------------------------------------------------------------------------------- what is right
    def norm(self, p: float) -> float:
        return float(np.linalg.norm(np.concatenate([x.reshape(-1) for x in self.full]), p))

    def check_norm(self, found: Any, p: float) -> None:
        platform = self.world.platform
        assert tuple(found.shape) == ()
        assert platform.dtype_name(found.dtype) == dtype_of(self.world)
        np.testing.assert_allclose(float(platform.to_numpy(found)), self.norm(p), rtol=tolerance(self.world))

    def check_gradients(self, factor: float) -> None:
        platform = self.world.platform
        for parameter, full in zip(self.parameters, self.full, strict=True):
            found = getattr(parameter, "main_grad", None)
            if found is None:
                found = parameter.grad if isinstance(parameter, DTensor) else platform.get_grad(parameter)
            whole = found.full_tensor() if isinstance(found, DTensor) else found
            np.testing.assert_allclose(
                platform.to_numpy(whole), full * factor, rtol=tolerance(self.world), atol=1e-12
            )


def line(world: World) -> DeviceMesh:
    return init_device_mesh(world.device_type, (world.size,), mesh_dim_names=("dp",))


def grid(world: World) -> DeviceMesh:
    shape = (2, world.size // 2) if world.size % 2 == 0 else (1, world.size)
    return init_device_mesh(world.device_type, shape, mesh_dim_names=("dp", "tp"))


# Each adds parameters; the numbers are the all-reduces that the norm takes with several ranks, and along two dims of two ranks.
def plain(twins: Twins) -> None:
    for shape in SHAPES:
        twins.plain(shape)


def replicated(twins: Twins) -> None:
    for shape in SHAPES:
        twins.placed(line(twins.world), [Replicate()], shape)


def sharded(twins: Twins) -> None:
    for shape in SHAPES:
        for dim in range(len(shape)):
            twins.placed(line(twins.world), [Shard(dim)], shape)


def mixed_on_one_mesh(twins: Twins) -> None:
    sharded(twins)
    replicated(twins)
    plain(twins)


def ragged(twins: Twins) -> None:
    size = twins.world.size
    twins.placed(
        line(twins.world), [RaggedShard((0,), (0, *(1,) * (size - 1)) if size > 1 else (1,))], (6, 2)
    )
    twins.placed(
        line(twins.world), [RaggedShard((0, 1), (*range(1, size), 12 - size * (size - 1) // 2))], (6, 2)
    )


def two_dims(twins: Twins) -> None:
    mesh = grid(twins.world)
    for shape in SHAPES:
        twins.placed(mesh, [Shard(0), Shard(1)], shape)
        twins.placed(mesh, [Shard(0), Shard(0)], shape)
        twins.placed(mesh, [StridedShard(0, mesh.size("tp")), Shard(0)], shape)
        twins.placed(mesh, [Replicate(), Shard(1)], shape)
        twins.placed(mesh, [Shard(1), Replicate()], shape)
        twins.placed(mesh, [Replicate(), Replicate()], shape)


def one_of_two_dims(twins: Twins) -> None:
    """As hybrid sharding has it: cut along one dim, the same along the other."""
    for shape in SHAPES:
        twins.placed(grid(twins.world), [Replicate(), Shard(0)], shape)


def fsdp_beside_tp(twins: Twins) -> None:
    """Layers under tensor parallelism lie on both dims, all others on the dim of data parallelism only."""
    mesh = grid(twins.world)
    for shape in SHAPES:
        twins.placed(mesh, [StridedShard(0, mesh.size("tp")), Shard(0)], shape)
        twins.placed(mesh, [Shard(0), Shard(1)], shape)
        twins.placed(mesh["dp"], [Shard(0)], shape)
    twins.plain()


def experts(twins: Twins) -> None:
    """Dense layers over all ranks, experts over a mesh of their own, both with the same ranks."""
    world = twins.world
    mesh = init_device_mesh(world.device_type, grid(world).shape, mesh_dim_names=("edp", "ep"))
    twins.placed(line(world), [Shard(0)], (5, 3))
    twins.placed(mesh, [Shard(1), Shard(0)], (4, 3, 2))
    twins.placed(mesh["ep"], [Shard(0)], (3, 2, 2))
    twins.placed(mesh["ep"], [Shard(0)], (1, 2, 2))


def partial(twins: Twins) -> None:
    mesh = line(twins.world)
    for op in ("sum", "avg", "max"):
        twins.partial(mesh, [Partial(op)])
        twins.partial(mesh, [Partial(op)], (1,))
        twins.partial(mesh, [Partial(op)], ())
    twins.placed(mesh, [Shard(0)], (5, 3))


def partial_of_two_dims(twins: Twins) -> None:
    mesh = grid(twins.world)
    twins.partial(mesh, [Partial("sum"), Partial("sum")])
    twins.partial(mesh, [Partial("avg"), Shard(0)])
    twins.partial(mesh, [Shard(0), Partial("sum")], (7,))
    twins.partial(mesh, [Replicate(), Partial("avg")])


@dataclass(frozen=True)
class Case:
    make: Callable[[Twins], None]
    reductions: tuple[int, int, int, int]
    """All-reduces of norms with 1, 2, 3 and 4 ranks."""
    is_partial: bool = False


CASES = {
    "plain": Case(plain, (0, 0, 0, 0)),
    "replicated": Case(replicated, (0, 0, 0, 0)),
    "sharded": Case(sharded, (0, 1, 1, 1)),
    "mixed_on_one_mesh": Case(mixed_on_one_mesh, (0, 1, 1, 1)),
    "ragged": Case(ragged, (0, 1, 1, 1)),
    "two_dims": Case(two_dims, (0, 1, 1, 1)),
    "one_of_two_dims": Case(one_of_two_dims, (0, 0, 1, 1)),
    "fsdp_beside_tp": Case(fsdp_beside_tp, (0, 1, 1, 2)),
    # The meshes of all ranks share a group; that of ep is another one where edp has ranks, too.
    "experts": Case(experts, (0, 1, 1, 2)),
    "partial": Case(partial, (0, 1, 1, 1), is_partial=True),
    "partial_of_two_dims": Case(partial_of_two_dims, (0, 1, 1, 1), is_partial=True),
}


@pytest.mark.parametrize("name", CASES)
@distributed(world_size=(1, 2, 3, 4))
def test_norms_and_clipping_are_those_of_the_full_gradients(world: World, name: str) -> None:
    case = CASES[name]
    for p in NORM_TYPES:
        twins = Twins(world)
        case.make(twins)
        get_grad_norm(twins.parameters, p)  # groups are made
        with count_collectives() as counted:
            twins.check_norm(get_grad_norm(twins.parameters, p), p)
        if not case.is_partial:
            counted.assert_counts(all_reduce=case.reductions[world.size - 1])
            assert counted.nbytes() == case.reductions[world.size - 1] * (
                8 if dtype_of(world) == "float64" else 4
            )
        everywhere = collectives.all_gather(
            world.platform.reshape(get_grad_norm(twins.parameters, p), (1,)), world.group
        )
        assert len(set(world.platform.to_numpy(everywhere).tolist())) == 1
        if p == NORM_TYPES[0]:
            twins.check_gradients(1.0)
        with count_collectives() as clipped:
            twins.check_norm(clip_grad_norm_(twins.parameters, MAX_NORM, p), p)
        assert clipped.counts == counted.counts
        norm = twins.norm(p)
        twins.check_gradients(min(1.0, MAX_NORM / (norm + 1e-6)))
        if p > 0.7 and norm > MAX_NORM:
            after = float(world.platform.to_numpy(get_grad_norm(twins.parameters, p)))
            assert after == pytest.approx(MAX_NORM, rel=1e-4)
