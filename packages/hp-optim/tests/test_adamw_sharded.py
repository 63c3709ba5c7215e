"""AdamW on DTensors gives the bits of one process, whatever lies where; replicas divide state and work."""

from __future__ import annotations

from typing import Any

import numpy as np

from hp_dtensor import DTensor, Replicate, Shard, StridedShard, distribute_tensor
from hp_dtensor.chunk import chunk_length
from hp_optim import AdamW
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, count_collectives, distributed

SHAPES = [(7, 3), (2, 5), (1,), (13,), (4, 2, 2), ()]
LEFT_OUT = ((), (1, 3), (), (0,), (5,))
"""Which parameters have no gradient, step by step."""


def widest(world: World) -> str:
    return "float64" if world.platform.supports("float64_compute", world.device) else "float32"


def meshes(world: World) -> list[tuple[int, int]]:
    """All shapes (replicas, shards) of the world."""
    return [(n, world.size // n) for n in range(1, world.size + 1) if world.size % n == 0]


class Run:
    """Parameters cut over a mesh (None: whole, in one process), and an optimizer."""

    def __init__(self, world: World, mesh: DeviceMesh | None, dim: int = 0, **options: Any) -> None:
        self.world, self.platform, self.mesh, self.dim = world, world.platform, mesh, dim
        self.dtype = widest(world)
        self.random = np.random.default_rng(3)
        self.parameters = [
            self.platform.parameter(self.cut(self.random.uniform(-1, 1, shape))) for shape in SHAPES
        ]
        self.optimizer = AdamW(
            [(f"p{at}", p) for at, p in enumerate(self.parameters)],
            lr=0.1,
            weight_decay=0.1,
            fused=False,
            **options,
        )

    def cut(self, value: Any) -> Any:
        tensor = self.platform.tensor(np.asarray(value), self.dtype, self.world.device)
        if self.mesh is None:
            return tensor
        last = Shard(self.dim) if len(tensor.shape) > self.dim else Replicate()
        return distribute_tensor(tensor, self.mesh, [Replicate(), last])

    def step(self, left_out: tuple[int, ...] = ()) -> None:
        for at, parameter in enumerate(self.parameters):
            gradient = self.cut(self.random.uniform(-1, 1, SHAPES[at]))
            found = None if at in left_out else gradient
            if isinstance(parameter, DTensor):
                parameter.grad = found
            else:
                self.platform.set_grad(parameter, found)
        self.optimizer.step()

    def whole(self, x: Any) -> Any:
        x = self.platform.detach(x) if not isinstance(x, DTensor) else x.detach().full_tensor()
        return self.platform.to_numpy(x)

    def check_against(self, other: Run) -> None:
        """Equal bit for bit: an element's numbers do not depend on what lies beside it."""
        for a, b in zip(self.parameters, other.parameters, strict=True):
            np.testing.assert_array_equal(self.whole(a), other.whole(b))
            mine, theirs = self.optimizer.state.get(a) or {}, other.optimizer.state.get(b) or {}
            assert list(mine) == list(theirs)
            for key, value in mine.items():
                if self.platform.is_tensor(value):
                    np.testing.assert_array_equal(self.whole(value), self.whole(theirs[key]))
                else:
                    assert value == theirs[key]


@distributed(world_size=(1, 2, 3, 4))
def test_steps_equal_one_process_on_every_mesh_with_and_without_division(world: World) -> None:
    for shape in meshes(world):
        mesh = init_device_mesh(world.device_type, shape)
        for dim in (0, 1):
            for options in ({}, {"divide_replicas": False, "amsgrad": True}, {"amsgrad": True}):
                own = {key: value for key, value in options.items() if key != "divide_replicas"}
                reference, run = Run(world, None, **own), Run(world, mesh, dim, **options)
                for left_out in LEFT_OUT:
                    run.step(left_out)
                    reference.step(left_out)
                run.check_against(reference)


@distributed(world_size=(1, 2, 3, 4))
def test_replicas_gather_their_pieces_in_one_collective_of_the_parameters_bytes(world: World) -> None:
    itemsize = 8 if widest(world) == "float64" else 4
    for replicas, shards in meshes(world):
        mesh = init_device_mesh(world.device_type, (replicas, shards))
        run = Run(world, mesh)
        with count_collectives() as counted:
            run.step()
        numel = 0
        for parameter in run.parameters:
            local = tuple(parameter.to_local().shape)
            if local:
                numel += replicas * chunk_length(local[0], replicas) * int(np.prod(local[1:]))
        is_divided = replicas > 1 and numel > 0
        counted.assert_counts(all_gather=int(is_divided))
        assert counted.nbytes() == (numel * itemsize if is_divided else 0)
        undivided = Run(world, mesh, divide_replicas=False)
        with count_collectives() as counted:
            undivided.step()
        counted.assert_counts()


@distributed(world_size=(2, 4))
def test_divided_state_is_sharded_over_both_mesh_dims(world: World) -> None:
    for replicas, shards in meshes(world):
        if replicas == 1:
            continue
        run = Run(world, init_device_mesh(world.device_type, (replicas, shards)))
        run.step()
        for parameter in run.parameters:
            value = run.optimizer.state[parameter]["exp_avg"]
            assert tuple(value.shape) == tuple(parameter.shape)
            assert value.dtype == parameter.dtype
            if parameter.ndim == 0:
                assert tuple(value.placements) == (Replicate(), Replicate())
                continue
            first = Shard(0) if shards == 1 else StridedShard(0, shards)
            assert tuple(value.placements) == (first, Shard(0))
            rows = parameter.to_local().shape[0]
            assert value.to_local().shape[0] <= -(-rows // replicas)


@distributed(world_size=(2, 4))
def test_state_that_lies_otherwise_is_taken_over(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2, world.size // 2))
    reference = Run(world, None)
    for first, second in ((True, False), (False, True)):
        before, after = (Run(world, mesh, divide_replicas=flag) for flag in (first, second))
        for left_out in ((), (1,)):
            before.step(left_out)
            after.random = before.random
        after.optimizer.load_state_dict(before.optimizer.state_dict())
        for group in after.optimizer.param_groups:
            group["divide_replicas"] = second
        for own, other in zip(after.parameters, before.parameters, strict=True):
            world.platform.copy_(own.to_local(), world.platform.detach(other.to_local()))
        reference = Run(world, None)
        for left_out in ((), (1,), (), ()):
            reference.step(left_out)
        after.step()
        after.step()
        after.check_against(reference)


@distributed(world_size=2)
def test_a_mesh_of_one_dim_is_not_divided(world: World) -> None:
    """What is Replicate beside parameters that are cut over the same ranks (norms beside tensor parallel layers) stays whole."""
    mesh = init_device_mesh(world.device_type, (2,))
    platform = world.platform
    value = distribute_tensor(platform.full((4, 2), 1.0, "float32", world.device), mesh, [Replicate()])
    parameter = platform.parameter(value)
    parameter.grad = distribute_tensor(
        platform.full((4, 2), 1.0, "float32", world.device), mesh, [Replicate()]
    )
    optimizer = AdamW([parameter])
    with count_collectives() as counted:
        optimizer.step()
    counted.assert_counts()
    assert tuple(optimizer.state[parameter]["exp_avg"].placements) == (Replicate(),)
