"""What Muon communicates: nothing where nothing is shared, else two all-to-all per batch with the bytes of what others own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hp_dtensor import Partial, Replicate, Shard, distribute_tensor
from hp_optim import Muon
from hp_platform import collectives, init_device_mesh
from hp_platform.testing import World, count_collectives, distributed


def sharded(
    world: World,
    shape: Sequence[int],
    placements: Sequence[Any],
    mesh_shape: Sequence[int] = (),
    *,
    dtype: str = "float32",
    seed: int = 0,
) -> Any:
    """A parameter with a gradient, the same on all ranks."""
    platform = world.platform
    mesh = init_device_mesh(world.device_type, tuple(mesh_shape) or (world.size,))
    values = np.random.default_rng(seed).normal(size=(2, *shape))
    found = distribute_tensor(platform.tensor(values[0], dtype, world.device), mesh, placements)
    found.requires_grad_(True)
    found.grad = distribute_tensor(platform.tensor(values[1], dtype, world.device), mesh, placements)
    return found


def local_bytes(parameters: Sequence[Any], itemsize: int) -> int:
    return sum(int(np.prod(p.local_shape)) for p in parameters) * itemsize


def stepped(world: World, parameters: Sequence[Any], **options: Any) -> Any:
    """What a second step communicates."""
    optimizer = Muon(parameters, **options)
    optimizer.step()
    with count_collectives() as counted:
        optimizer.step()
    return counted


@distributed(world_size=[2, 4], backends=["torch", "cuda"])
def test_a_rank_sends_what_it_holds_of_matrices_of_others_and_gets_the_updates_back(world: World) -> None:
    n = world.size
    parameters = [sharded(world, (4 * n, 6), [Shard(0)], seed=i) for i in range(2 * n)]
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2), (None, 2)):
        counted = stepped(world, parameters, ns_dtype=dtype)
        counted.assert_counts(all_to_all=2)
        # Of 2 n matrices of one cost each rank owns 2: it sends its 4 rows of the others, and returns n - 1 parts of its own.
        others = local_bytes(parameters, itemsize) * (n - 1) // n
        assert [launch.nbytes for launch in counted.record.launches] == [others, others]


@distributed(world_size=[2, 4], backends=["torch", "cuda"])
def test_memory_for_fewer_matrices_makes_more_batches_of_the_same_bytes(world: World) -> None:
    n = world.size
    parameters = [sharded(world, (4 * n, 6), [Shard(0)], seed=i) for i in range(3 * n)]
    whole = stepped(world, parameters, ns_dtype="float32")
    parts = stepped(world, parameters, ns_dtype="float32", memory_cap=1)
    whole.assert_counts(all_to_all=2)
    parts.assert_counts(all_to_all=6)
    assert parts.nbytes() == whole.nbytes()


@distributed(world_size=4, backends=["torch", "cuda"])
def test_replicas_gather_within_one_replica_and_send_the_update_to_all(world: World) -> None:
    parameters = [sharded(world, (8, 6), [Replicate(), Shard(0)], (2, 2), seed=i) for i in range(8)]
    counted = stepped(world, parameters, ns_dtype="float32")
    counted.assert_counts(all_to_all=2)
    gathered, returned = (launch.nbytes for launch in counted.record.launches)
    # Each of the 4 ranks owns 2 of the 8 matrices. Its replica, 2 ranks, owns 4: it sends its half of the other rank's 2.
    half = 8 * 6 * 4 // 2
    assert gathered == 2 * half
    # The update of each of its 2 goes to the other 3 ranks, a half to each.
    assert returned == 2 * 3 * half


@distributed(world_size=4, backends=["torch", "cuda"])
def test_replicated_parameters_send_updates_only(world: World) -> None:
    parameters = [sharded(world, (3, 5), [Replicate()], seed=i) for i in range(4)]
    counted = stepped(world, parameters, ns_dtype="float32")
    counted.assert_counts(all_to_all=2)
    gathered, returned = (launch.nbytes for launch in counted.record.launches)
    assert gathered == 0
    assert returned == 3 * 15 * 4


@distributed(world_size=[1, 2, 4])
def test_experts_over_ranks_and_parameters_of_one_rank_cost_nothing(world: World) -> None:
    platform = world.platform
    experts = [sharded(world, (5, 4, 6), [Shard(0)], seed=i) for i in range(2)]
    plain = platform.parameter(platform.full((3, 4), 1.0, "float32", world.device))
    platform.set_grad(plain, platform.full((3, 4), 2.0, "float32", world.device))
    row = sharded(world, (1, 6), [Shard(0)])
    optimizer = Muon([*experts, plain, row], ns_dtype="float32")
    with count_collectives() as counted:
        optimizer.step()
    counted.assert_counts()


@distributed(world_size=2)
def test_the_memory_cap_of_a_group_counts(world: World) -> None:
    parameters = [sharded(world, (4, 6), [Shard(0)], seed=i) for i in range(4)]
    with count_collectives() as counted:
        Muon([{"params": parameters[:1]}, {"params": parameters[1:], "memory_cap": 1}]).step()
    counted.assert_counts(all_to_all=4)


@distributed(world_size=2)
def test_gradients_that_are_sums_over_ranks_are_summed_first(world: World) -> None:
    platform = world.platform
    found = {}
    for kind in ("whole", "partial"):
        parameter = sharded(world, (6, 4), [Shard(0)])
        if kind == "partial":
            whole = platform.detach(parameter.grad.full_tensor())
            share = platform.mul_(platform.clone(whole), 0.25 if world.rank == 0 else 0.75)
            parameter.main_grad = type(parameter).from_local(
                share, parameter.device_mesh, [Partial()], shape=(6, 4)
            )
        Muon([parameter], ns_dtype="float32").step()
        found[kind] = platform.to_numpy(platform.detach(parameter.to_local()))
    np.testing.assert_allclose(found["partial"], found["whole"], rtol=0, atol=1e-6)


@distributed(world_size=[2, 4])
def test_replicas_stay_equal_to_the_bit(world: World) -> None:
    platform = world.platform
    outer = (world.size, 1)
    layouts: dict[str, Any] = {
        "whole": sharded(world, (5, 7), [Replicate()]),
        "rows": sharded(world, (5, 7), [Replicate(), Shard(0)], outer),
        "columns": sharded(world, (9, 37), [Replicate(), Shard(1)], outer),
        "parts of rows": sharded(world, (12, 5), [Replicate(), Shard(0)], outer),
        "experts": sharded(world, (3, 4, 5), [Replicate(), Shard(0)], outer),
    }
    if world.size == 4:
        for name, dim in (("halves of rows", 0), ("halves of columns", 1)):
            layouts[name] = sharded(world, (9, 37), [Replicate(), Shard(dim)], (2, 2))

    def split(name: str, shape: tuple[int, ...]) -> dict[str, Any] | None:
        return {"rows": [6, 3, 3], "cols": [2, 3]} if name == "parts of rows" else None

    optimizer = Muon(layouts.items(), split=split)
    for _ in range(3):
        optimizer.step()
    for name, parameter in layouts.items():
        mine = platform.to_bits(platform.detach(parameter.to_local())).astype(np.int64)
        found = collectives.all_gather_object(
            (parameter.local_shape, parameter._spec.local_offset, mine.tolist())
        )
        for shape, offset, bits in found:
            if (shape, offset) == (parameter.local_shape, parameter._spec.local_offset):
                assert bits == mine.tolist(), name


@distributed(world_size=[2, 3])
def test_a_parameter_without_gradient_stays_and_is_not_sent(world: World) -> None:
    platform = world.platform
    parameters = [sharded(world, (6, 4), [Shard(0)], seed=i) for i in range(3)]
    parameters[1].grad = None
    before = platform.to_numpy(platform.detach(parameters[1].to_local()))
    optimizer = Muon(parameters, ns_dtype="float32")
    optimizer.step()
    assert np.array_equal(platform.to_numpy(platform.detach(parameters[1].to_local())), before)
    assert parameters[1] not in optimizer.state
    assert len(optimizer.state_dict()["state"]) == 2
    parameters[1].grad = parameters[0].grad
    optimizer.step()
    assert len(optimizer.state_dict()["state"]) == 3


@distributed(world_size=2)
def test_a_gradient_that_one_rank_lacks_is_told_on_all_ranks(world: World) -> None:
    parameters = [sharded(world, (6, 4), [Shard(0)], seed=i) for i in range(3)]
    optimizer = Muon([(f"layers.{i}.weight", p) for i, p in enumerate(parameters)], ns_dtype="float32")
    optimizer.step()
    if world.rank == 1:
        parameters[2].grad = None
    parameters[0].grad = None
    message = (
        r"Parameter 2 of those that they share: rank 0 has layers\.2\.weight of shape \(6, 4\) as \(Shard\(0\),\).* with a gradient; "
        r"rank 1 has layers\.2\.weight.* without a gradient\. Give all ranks"
    )
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


@distributed(world_size=2)
def test_experts_of_one_rank_may_lack_a_gradient(world: World) -> None:
    shared = [sharded(world, (6, 4), [Shard(0)], seed=i) for i in range(3)]
    experts = [sharded(world, (2, 4, 6), [Shard(0)], seed=i) for i in range(2)]
    optimizer = Muon([*shared, *experts], ns_dtype="float32")
    for step in range(3):
        experts[step % 2].grad = None if world.rank == 1 else experts[step % 2].grad
        optimizer.step()
    assert (experts[0] in optimizer.state) == (world.rank == 0)


@distributed(world_size=2, backends=["cuda", "npu"])
def test_offloaded_parameters_stay_on_the_host_and_equal_those_on_the_device(world: World) -> None:
    platform = world.platform
    mesh = init_device_mesh(world.device_type, (2,))
    found = []
    for device in ("cpu", world.device):
        optimized = []
        for seed, shape in enumerate([(6, 4), (5, 3), (2, 4, 3)]):
            values = np.random.default_rng(seed).normal(size=(2, *shape)).astype(np.float32)
            weight, gradient = (
                type(x).from_local(platform.to_device(x.to_local(), device), mesh, [Shard(0)], shape=shape)
                for x in (
                    distribute_tensor(platform.tensor(v, "float32", world.device), mesh, [Shard(0)])
                    for v in values
                )
            )
            weight.requires_grad_(True)
            weight.grad = gradient
            optimized.append(weight)
        optimizer = Muon(optimized, ns_dtype="float32")
        for _ in range(2):
            optimizer.step()
        for weight in optimized:
            momentum = optimizer.state[weight]["momentum_buffer"]
            for x in (weight, momentum):
                assert platform.device_of(x.to_local()).partition(":")[0] == device.partition(":")[0]
        found.append([platform.to_numpy(platform.detach(weight.to_local())) for weight in optimized])
    for of_host, of_device in zip(*found, strict=True):
        np.testing.assert_allclose(of_host, of_device, rtol=0, atol=1e-6)
