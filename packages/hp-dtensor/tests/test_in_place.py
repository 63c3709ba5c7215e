"""Operations in place: the target stays as it lies, whatever the operands do, and gradients are those of the unsharded program."""

from typing import Any

import pytest

from hp_dtensor import Partial, Placement, Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

PLACEMENTS: list[Placement] = [Shard(0), Shard(1), Replicate(), Partial()]
# A handful of roundings of numbers below 100, in float64 or (where that cannot be reduced) float32.
TOLERANCE = {"float64": 1e-13, "float32": 1e-4}

CALLS: dict[str, Any] = {
    "add_": lambda x, y: x.add_(y),
    "iadd": lambda x, y: x.__iadd__(y),
    "add a number": lambda x, y: x.add_(2.0),
    "mul_": lambda x, y: x.mul_(y),
    "mul by a number": lambda x, y: x.mul_(3.0),
    "floor_": lambda x, y: x.floor_(),
    "clamp_": lambda x, y: x.clamp_(min=0.5),
    "div_": lambda x, y: x.div_(y),
}


def _values(world: World, start: int) -> tuple[Any, str]:
    platform = world.platform
    real = "float64" if platform.supports("reduce_float64", world.device_type) else "float32"
    values = [((start + i * 7) % 11 - 5) / 2 or 3.0 for i in range(15)]
    return platform.reshape(platform.tensor(values, real, world.device), (5, 3)), real


@distributed([2, 3])
def test_the_target_gets_the_values_of_the_unsharded_program_and_stays_where_it_lies(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    (x, real), (y, _) = _values(world, 0), _values(world, 4)
    whole = {
        "add_": x + y, "iadd": x + y, "add a number": x + 2.0, "mul_": x * y, "mul by a number": x * 3.0,
        "floor_": x.floor(), "clamp_": world.platform.where(x > 0.5, x, x * 0 + 0.5), "div_": x / y,
    }  # fmt: skip
    with world.platform.no_grad():
        for at in PLACEMENTS:
            for other in PLACEMENTS:
                for name, call in CALLS.items():
                    target = distribute_tensor(x, mesh, [at])
                    memory = world.platform.data_ptr(target.to_local())
                    result = call(target, distribute_tensor(y, mesh, [other]))
                    label = f"{name} of {at} with {other}"
                    assert result is target, label
                    assert target.placements == (at,), label
                    assert world.platform.data_ptr(target.to_local()) == memory, label
                    assert_parity(target.full_tensor(), whole[name], atol=TOLERANCE[real], rtol=0, name=label)


@distributed(2)
def test_in_place_with_operands_that_lie_alike_moves_nothing(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    (x, _), (y, _) = _values(world, 0), _values(world, 4)
    with world.platform.no_grad(), count_collectives() as record:
        for at in (Shard(0), Replicate()):
            distribute_tensor(x, mesh, [at]).add_(distribute_tensor(y, mesh, [at])).mul_(2.0)
    record.assert_counts()


@pytest.mark.parametrize("at", PLACEMENTS, ids=str)
@distributed(2, backends=["torch", "cuda", "npu"])
def test_in_place_operations_are_recorded_for_backward(world: World, at: Placement) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    (x, real), (y, _) = _values(world, 0), _values(world, 4)
    platform = world.platform
    grads = []
    for sharded in (False, True):
        a, b = (platform.set_requires_grad_(platform.clone(v), True) for v in (x, y))
        first = distribute_tensor(a, mesh, [Shard(0)]) if sharded else a
        second = distribute_tensor(b, mesh, [Replicate() if at.is_partial() else at]) if sharded else b
        if sharded:
            first, second = (platform.set_requires_grad_(t.detach(), True) for t in (first, second))
        target = first * 2.0
        if sharded:
            target = target.redistribute(placements=[at])
        target.mul_(second).add_(second)
        (target * target).sum().backward()
        grads.append([t.grad.full_tensor() if sharded else platform.get_grad(t) for t in (first, second)])
    for plain, of_shards in zip(*grads, strict=True):
        assert_parity(of_shards, plain, atol=100 * TOLERANCE[real], rtol=0)


@distributed(2, backends=["torch", "cuda", "npu"])
def test_writing_into_what_would_be_a_view_reaches_the_tensor_or_is_refused(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    whole, _ = _values(world, 0)
    reaches = {
        "a kept cut": lambda x: x.transpose(0, 1),
        "whole dims": lambda x: x[:, 1],
        "rows": lambda x: x.view(5, 3, 1),
    }
    copies = {
        "a row": lambda x: x[0],
        "a view of it": lambda x: x[0].view(3, 1),
        "half": lambda x: x.narrow(0, 1, 2),
        "a view like another tensor": lambda x: x.view_as(world.platform.reshape(whole, (3, 5))),
        "windows": lambda x: x.unfold(0, 2, 2),
    }
    for name, view in reaches.items():
        x, plain = distribute_tensor(whole, mesh, [Shard(0)]), world.platform.clone(whole)
        view(x).zero_()
        view(plain).zero_()
        assert_parity(x.full_tensor(), plain, exact=True, name=name)
    for view in copies.values():
        x = distribute_tensor(whole, mesh, [Shard(0)])
        with pytest.raises(ValueError, match="which is no view here: pieces had to move"):
            view(x).zero_()
        view(x).clone().zero_()
        x[world.platform.tensor([0, 1], "int64", world.device)].zero_()  # never a view
        assert_parity(x.full_tensor(), whole, exact=True)
