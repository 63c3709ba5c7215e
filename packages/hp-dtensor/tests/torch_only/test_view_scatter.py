"""What writes parts of tensors, sees them otherwise in their place, walks over them, or initialises them by such steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import init

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, random
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def _numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


# What changes its tensor in place and returns it: the shape of the tensor, the call.
IN_PLACE: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "diagonal of a wide matrix": ((3, 7), lambda x: x.fill_diagonal_(-1.0)),
    "diagonal of a tall matrix": ((7, 2), lambda x: x.fill_diagonal_(-1.0)),
    "t_": ((5, 3), lambda x: x.t_()),
    "transpose_": ((5, 3, 2), lambda x: x.transpose_(0, 2)),
    "swapaxes_": ((5, 3), lambda x: x.swapaxes_(0, -1)),
    "unsqueeze_": ((5, 3), lambda x: x.unsqueeze_(0)),
    "squeeze_": ((5, 3, 1), lambda x: x.squeeze_(2)),
    "init.eye_": ((5, 3), init.eye_),
    "init.dirac_": ((5, 3, 2), init.dirac_),
    "init.dirac_ in groups": ((4, 3, 2, 3), lambda x: init.dirac_(x, 2)),
    "init.ones_": ((5, 3), init.ones_),
    "init.constant_": ((5, 3), lambda x: init.constant_(x, 2.5)),
}


@pytest.mark.parametrize("name", IN_PLACE)
@distributed(world_size=3, backends="torch")
def test_each_rank_writes_its_piece_of_what_the_unsharded_program_writes(name: str, world: World) -> None:
    shape, call = IN_PLACE[name]
    mesh = init_device_mesh(world.device_type, (world.size,))
    expected = call(_numbers(*shape))
    for placement in (S0, S1, R):
        x = distribute_tensor(_numbers(*shape), mesh, [placement])
        with count_collectives() as counted:
            found = call(x)
        counted.assert_counts()
        assert found is x
        assert (tuple(x.shape), x.size(), x.dim()) == (tuple(expected.shape), expected.size(), expected.dim())
        assert_parity(x, expected, exact=True, name=f"{name} {placement}")


@distributed(world_size=2, backends="torch")
def test_gradients_pass_what_is_seen_otherwise_or_written_in_part(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    weights = _numbers(5, 3)

    def program(x: Any, weights: Any) -> Any:
        y = (x * 2).t_()
        z = (x * x).fill_diagonal_(3.0)
        return (y * weights.t()).sum() + (z * weights).sum()

    whole = _numbers(5, 3).requires_grad_()
    program(whole, weights).backward()
    for placement in (S0, S1, R):
        x = distribute_tensor(_numbers(5, 3), mesh, [placement]).requires_grad_()
        program(x, distribute_tensor(weights, mesh, [placement])).backward()
        assert_parity(x.grad, whole.grad, exact=True, name=str(placement))


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
@distributed(world_size=2, backends="torch")
def test_an_orthogonal_weight_is_that_of_the_unsharded_program(shape: tuple[int, int], world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    random.manual_seed(5)
    with random.global_draws():
        expected = init.orthogonal_(torch.empty(shape, dtype=torch.float64), 1.5)
    for placement in (S0, S1, R):
        x = distribute_tensor(torch.zeros(shape, dtype=torch.float64), mesh, [placement])
        random.manual_seed(5)
        assert init.orthogonal_(x, 1.5) is x
        assert x.placements == (placement,)
        assert_parity(x, expected, exact=True, name=str(placement))
    product = expected @ expected.t() if shape[0] <= shape[1] else expected.t() @ expected
    # Three roundings of numbers below 3.
    assert_parity(product, torch.eye(min(shape), dtype=torch.float64) * 2.25, rtol=0, atol=1e-14)


@distributed(world_size=2, backends="torch")
def test_walking_over_a_tensor_is_unbinding_it(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    whole = _numbers(3, 4)
    for placement in (S0, S1, R):
        x = distribute_tensor(whole, mesh, [placement]).requires_grad_()
        first, second, third = x
        for row, other, expected in zip((first, second, third), x.unbind(), whole, strict=True):
            assert isinstance(row, DTensor)
            assert row.placements == other.placements
            assert_parity(row, expected, exact=True)
        (first * second).sum().backward()
        assert_parity(x.grad, torch.stack([whole[1], whole[0], whole[0] * 0]), exact=True)


@distributed(world_size=2, backends="torch")
def test_memory_is_read_by_strides_where_it_is_whole(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    whole = _numbers(4, 4)
    x = distribute_tensor(whole, mesh, [R])
    assert_parity(x.as_strided((2, 2), (4, 1), 1), whole.as_strided((2, 2), (4, 1), 1), exact=True)
    with pytest.raises(
        ValueError, match=r"use view, narrow, unfold, expand or a subscript.*redistribute it to Replicate"
    ):
        torch.as_strided(distribute_tensor(whole, mesh, [S0]), (2, 2), (4, 1))


MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a part of another shape": (
        lambda x: torch.select_scatter(x, x, 0, 1),
        r"must have the shape \(4,\) of the part",
    ),
    "no such index": (
        lambda x: torch.select_scatter(x, x[0], 0, 4),
        "index 4 is out of range for dim 0 of size 4",
    ),
    "a leaf turned around": (
        lambda x: x.requires_grad_().t_(),
        "t_ would change a leaf that requires grad: use t",
    ),
    "a sum": (
        lambda x: x.redistribute(placements=[Partial()]).fill_diagonal_(1.0),
        r"cannot write into a sum.*call reduce_partial\(\) first",
    ),
    "a cut dim of size 1": (
        lambda x: x[:, :1].redistribute(placements=[S1]).squeeze_(1),
        "squeeze_ of .* moves pieces, so that the tensor would leave its memory: use squeeze",
    ),
    "an index that is none": (lambda x: range(9)[x.sum()], "is no index: it needs one whole number"),
    "an identity of another shape": (lambda x: torch.eye(3, out=x), r"must be a DTensor of shape \(3, 3\)"),
}


@distributed(world_size=2, backends="torch")
def test_mistakes_are_named(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    for call, message in MISTAKES.values():
        with pytest.raises(ValueError, match=message):
            call(distribute_tensor(_numbers(4, 4), mesh, [S0]))
    x = distribute_tensor(torch.arange(4), mesh, [S0])
    assert range(9)[x.max()] == 3
    assert x.max().is_nonzero()
