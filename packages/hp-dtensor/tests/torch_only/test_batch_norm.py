"""Batch norm and its kin over cut batches: values, gradients of any order, running statistics and what is communicated."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

# Sums of at most 200 numbers below 10, divided by deviations above 0.1, in float64.
TOLERANCE = 1e-12
F64 = torch.float64


def _numbers(world: World, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=generator, dtype=F64).to(world.device_type) * 2 + 1


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vectors": (lambda: nn.BatchNorm1d(5, dtype=F64), (7, 5)),
    "fewer samples than ranks": (lambda: nn.BatchNorm1d(3, dtype=F64), (2, 3)),
    "sequences": (lambda: nn.BatchNorm1d(3, momentum=None, dtype=F64), (5, 3, 4)),
    "images": (lambda: nn.BatchNorm2d(2, eps=1e-2, dtype=F64), (3, 2, 4, 3)),
    "no weights": (lambda: nn.BatchNorm2d(2, affine=False, momentum=0.3, dtype=F64), (6, 2, 1, 2)),
    "no running statistics": (lambda: nn.BatchNorm1d(4, track_running_stats=False, dtype=F64), (5, 4)),
    "instances": (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True, dtype=F64), (5, 3, 4)),
}


def _as_dtensors(layer: nn.Module, mesh: Any) -> nn.Module:
    made = copy.deepcopy(layer)
    for name, parameter in layer.named_parameters():
        setattr(made, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
    return made


@pytest.mark.parametrize("kind", LAYERS)
@distributed(3, backends=("torch", "cuda"))
def test_training_and_evaluation_over_a_cut_batch_are_those_of_the_whole(kind: str, world: World) -> None:
    make, shape = LAYERS[kind]
    mesh = init_device_mesh(world.device_type, (world.size,))
    whole = make().to(world.device_type)
    for parameter in whole.parameters():
        nn.init.normal_(parameter, 1.0, 0.5, generator=torch.Generator(world.device_type).manual_seed(5))
    layer = _as_dtensors(whole, mesh)
    for step in range(2):
        x = (_numbers(world, *shape) + step).requires_grad_()
        own = distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_()
        expected, found = whole(x), layer(own)
        assert found.placements == (Shard(0),)
        (expected**3).sum().backward()
        (found**3).sum().backward()
        for name, value, wanted in (("output", found, expected), ("input", own.grad, x.grad)):
            assert_parity(value, wanted, rtol=TOLERANCE * 100, atol=TOLERANCE * 100, name=f"{kind} {name}")
    for name, parameter in whole.named_parameters():
        found = layer.get_parameter(name).grad
        assert_parity(
            found, parameter.grad, rtol=TOLERANCE * 100, atol=TOLERANCE * 100, name=f"{kind} {name}"
        )
    for name, buffer in whole.named_buffers():
        assert_parity(layer.get_buffer(name), buffer, rtol=TOLERANCE, atol=TOLERANCE, name=f"{kind} {name}")
    whole.eval(), layer.eval()
    assert_parity(layer(own), whole(x), rtol=TOLERANCE, atol=TOLERANCE, name=f"{kind} in evaluation")


@distributed(4, backends=("torch", "cuda"))
def test_statistics_cost_two_reductions_of_a_number_per_channel_each_way(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (4,))
    x = distribute_tensor(_numbers(world, 6, 5, 2), mesh, [Shard(0)]).requires_grad_()
    running = torch.zeros(5, dtype=F64, device=x.device), torch.ones(5, dtype=F64, device=x.device)
    with count_collectives() as counted:
        y = F.batch_norm(x, *running, training=True)
    counted.assert_counts(all_reduce=2)
    assert counted.nbytes() == 2 * 5 * 8
    with count_collectives() as counted:
        y.sum().backward()
    counted.assert_counts(all_reduce=2)
    assert counted.nbytes() == 2 * 5 * 8
    with count_collectives() as counted:
        F.batch_norm(x, *running)
        F.batch_norm(x.detach().redistribute(placements=[Shard(1)]), None, None, training=True)
    counted.assert_counts(all_to_all=1)


@distributed(4, backends=("torch",))
def test_batch_and_channels_may_be_cut_at_once_and_second_derivatives_are_right(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2, 2))
    value, factor = _numbers(world, 5, 3, 2), _numbers(world, 5, 3, 2).flip(0)

    def second(x: Any, factor: Any) -> Any:
        y = F.batch_norm(x, None, None, training=True) * factor
        (g,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad((g**2 * factor).sum(), x)
        return h

    expected = second(value.requires_grad_(), factor)
    for placements in ([Shard(0), Shard(1)], [Shard(2), Shard(0)], [Shard(0), Shard(0)]):
        x = distribute_tensor(value.detach(), mesh, placements).requires_grad_()
        found = second(x, distribute_tensor(factor, mesh, placements))
        assert isinstance(found, DTensor)
        assert_parity(found, expected, rtol=1e-10, atol=1e-10, name=str(placements))


@distributed(2, backends=("torch",))
def test_running_statistics_that_lie_otherwise_are_refused(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    x = distribute_tensor(_numbers(world, 4, 4), mesh, [Shard(1)])
    running = torch.zeros(4, dtype=F64), torch.ones(4, dtype=F64)
    with pytest.raises(
        ValueError, match=r"writes the running statistics, which lie as .*redistribute them before"
    ):
        F.batch_norm(x, *running, training=True)
