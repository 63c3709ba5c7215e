"""Functions of torch on lists of tensors: what optimizers, GradScaler and clip_grad_norm_ call, on DTensors."""

import math
from typing import Any

import pytest
import torch

from hp_dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from hp_dtensor._names.foreach import ELEMENTWISE
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

TORCH = ("torch", "cuda")
# A dozen roundings of numbers below 10 in float64.
TOLERANCE = 1e-13
SHAPES = [(5, 3), (1,), (4, 2), (3, 2)]
PLACEMENTS: list[Placement] = [Shard(0), Shard(0), Replicate(), Shard(1)]


def _mesh(world: World) -> DeviceMesh:
    return init_device_mesh(world.device_type, (world.size,))


def _lists(world: World, count: int) -> tuple[list[list[torch.Tensor]], list[list[Any]]]:
    """``count`` lists of plain tensors with numbers from 0.1 to 0.9, and the same as DTensors."""
    generator = torch.Generator().manual_seed(0)
    plain = [
        [
            (torch.rand(s, generator=generator, dtype=torch.float64) * 0.8 + 0.1).to(world.device)
            for s in SHAPES
        ]
        for _ in range(count)
    ]
    mesh = _mesh(world)
    cut = [[distribute_tensor(x, mesh, [p]) for x, p in zip(xs, PLACEMENTS, strict=True)] for xs in plain]
    return plain, cut


def _same(found: Any, expected: Any, name: str) -> None:
    for x, y in zip(found, expected, strict=True):
        assert isinstance(x, DTensor), name
        assert_parity(x, y, rtol=TOLERANCE, atol=TOLERANCE, name=name)


NUM_LISTS = {
    "add": 2,
    "addcdiv": 3,
    "addcmul": 3,
    "copy": 2,
    "div": 2,
    "lerp": 3,
    "maximum": 2,
    "minimum": 2,
    "mul": 2,
}
NUM_LISTS.update({"sub": 2, "clamp_max": 2, "clamp_min": 2, "pow": 2})


@distributed([2, 3], backends=TORCH)
def test_every_elementwise_function_of_lists_gives_the_unsharded_values(world: World) -> None:
    tried = 0
    for name in ELEMENTWISE.split():
        for end in ("", "_"):
            function = getattr(torch, f"_foreach_{name}{end}", None)
            if function is None:
                continue
            plain, cut = _lists(world, NUM_LISTS.get(name, 1))
            with count_collectives() as counted:
                found = function(*cut)
            counted.assert_counts()
            expected = function(*plain)
            if end:
                found, expected = cut[0], plain[0]
            _same(found, expected, f"{name}{end}")
            assert [x.placements for x in found] == [(p,) for p in PLACEMENTS]
            tried = tried + 1
    assert tried > 70


@distributed(2, backends=TORCH)
def test_numbers_lists_of_numbers_and_single_tensors_stand_beside_lists(world: World) -> None:
    factor = torch.tensor(0.5, dtype=torch.float64, device=world.device)
    numbers = [1.0, 2.0, 3.0, 4.0]
    for function, args in (
        (torch._foreach_mul_, (factor,)),
        (torch._foreach_add_, (numbers,)),
        (torch._foreach_pow, (2,)),
        (torch._foreach_div, ([factor] * 4,)),
    ):
        (plain,), (cut,) = _lists(world, 1)
        found, expected = function(cut, *args), function(plain, *args)
        _same(found, expected, function.__name__)
    (plain,), (cut,) = _lists(world, 1)
    _same(torch._foreach_pow(0.9, cut), torch._foreach_pow(0.9, plain), "a number to the power of a list")
    _same(torch._foreach_add_(cut, cut, alpha=3), torch._foreach_add_(plain, plain, alpha=3), "alpha")


@distributed(2, backends=TORCH)
def test_lists_that_lie_differently_are_brought_to_how_the_first_lies(world: World) -> None:
    mesh = _mesh(world)
    x, y = torch.arange(6.0, dtype=torch.float64).reshape(3, 2), torch.ones(3, 2, dtype=torch.float64) * 2
    x, y = x.to(world.device), y.to(world.device)
    for first in (Shard(0), Replicate()):
        for second in (Shard(0), Shard(1), Replicate(), Partial()):
            a, b = distribute_tensor(x, mesh, [first]), distribute_tensor(y, mesh, [second])
            (found,) = torch._foreach_mul([a], [b])
            assert found.placements == (first,)
            assert_parity(found, x * y, rtol=TOLERANCE, name=f"{first} {second}")
    with pytest.raises(ValueError, match="cannot write into a tensor with placements"):
        torch._foreach_mul_([distribute_tensor(x, mesh, [Partial()])], 2.0)
    (reduced,) = torch._foreach_abs([distribute_tensor(x, mesh, [Partial()])])
    assert reduced.placements == (Replicate(),)
    for wrong, message in (
        (lambda: torch._foreach_add([a], [b, b]), "has 2 members, the first list 1"),
        (
            lambda: torch._foreach_add([distribute_tensor(x, mesh, [Shard(0)])], [y]),
            "a plain tensor of shape",
        ),
        (lambda: torch._foreach_add([x], [b]), "the first list has a plain tensor"),
        (lambda: torch._foreach_mul([a], y), "give one element"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


@distributed([2, 3], backends=TORCH)
def test_members_of_lists_broadcast_to_each_other(world: World) -> None:
    mesh = _mesh(world)
    whole = torch.arange(15.0, dtype=torch.float64, device=world.device).reshape(5, 3)
    for at in (Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(whole, mesh, [at])
        for small in (whole[2, 1], whole[1], whole[:, :1], whole[2:3, 1:2], whole[:1]):
            for placed in (
                distribute_tensor(small, mesh),
                distribute_tensor(small, mesh, [Partial()]),
                small,
            ):
                if placed is small and small.ndim:
                    continue  # plain tensors count for all, or are refused
                for a, b in (([x], [placed]), ([placed], [x])):
                    (found,) = torch._foreach_add(a, b)
                    assert found.placements == (at,)
                    assert_parity(found, whole + small, rtol=TOLERANCE, name=f"{at} {tuple(small.shape)}")
        y = x.clone()
        torch._foreach_mul_([y], [distribute_tensor(whole[:, :1], mesh, [Shard(0)])])
        assert_parity(y, whole * whole[:, :1], rtol=TOLERANCE, name=str(at))
        with pytest.raises(ValueError, match="lists must agree in shape and mesh at each index"):
            torch._foreach_mul_([distribute_tensor(whole[:1], mesh)], [x])


@distributed([2, 3], backends=TORCH)
def test_norms_of_lists_are_those_of_the_whole_with_one_reduction(world: World) -> None:
    (plain,), (cut,) = _lists(world, 1)
    for p in (1, 2, 3.0, 0.0, math.inf):
        with count_collectives() as counted:
            found = torch._foreach_norm(cut, p)
        counted.assert_counts(all_reduce=1)
        _same(found, torch._foreach_norm(plain, p), f"norm {p}")
        assert all(x.placements == (Replicate(),) for x in found)
    halves = [x.to(torch.bfloat16) * 1000 for x in cut]
    for x, y in zip(
        torch._foreach_norm(halves),
        torch._foreach_norm([x.to(torch.bfloat16) * 1000 for x in plain]),
        strict=True,
    ):
        assert x.dtype == torch.bfloat16
        assert_parity(x.to(torch.float64), y.to(torch.float64), rtol=2**-7, name="bfloat16")
    for x in cut:
        x.requires_grad_()
    with pytest.raises(ValueError, match="record no gradient"):
        torch._foreach_norm(cut)


@distributed(2, backends=TORCH)
def test_norms_on_a_mesh_of_two_dims_count_no_copy_twice(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (1, 2))
    x = torch.arange(1.0, 7, dtype=torch.float64, device=world.device)
    for placements in (
        [Shard(0), Replicate()],
        [Replicate(), Shard(0)],
        [Shard(0), Shard(0)],
        [Replicate(), Replicate()],
    ):
        _same(torch._foreach_norm([distribute_tensor(x, mesh, placements)]), [x.norm()], str(placements))


@distributed(2, backends=TORCH)
def test_a_value_that_is_not_finite_on_one_rank_is_found_on_all(world: World) -> None:
    mesh = _mesh(world)
    for bad in (False, True):
        x = torch.tensor([4.0, 6.0, 2.0], device=world.device)
        if bad:
            x[2] = math.inf  # the last rank's alone
        grad, whole = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(x, mesh, [Replicate()])
        found_inf = torch.zeros((), device=world.device)
        scale = torch.full((), 0.5, device=world.device)
        torch._amp_foreach_non_finite_check_and_unscale_([grad], found_inf, scale)
        assert found_inf.item() == float(bad)
        torch._amp_foreach_non_finite_check_and_unscale_([whole], torch.zeros((), device=world.device), scale)
        if not bad:
            assert grad.tolist() == whole.tolist() == [2.0, 3.0, 1.0]


@pytest.mark.parametrize("foreach", [True, False])
@distributed([1, 2], backends=TORCH)
def test_clipping_takes_several_meshes_and_plain_tensors(foreach: bool, world: World) -> None:
    meshes = (_mesh(world), init_device_mesh(world.device_type, (1, world.size)))
    plain, mixed = (
        [torch.nn.Parameter(torch.ones(3, dtype=torch.float64, device=world.device)) for _ in range(3)]
        for _ in range(2)
    )
    mixed[1:] = [
        torch.nn.Parameter(distribute_tensor(x.detach(), mesh, [Replicate()] * (mesh.ndim - 1) + [Shard(0)]))
        for x, mesh in zip(mixed[1:], meshes, strict=True)
    ]
    for p in (1.0, 2.0, math.inf):
        norms = []
        for xs in (plain, mixed):
            for i, x in enumerate(xs):
                x.grad = (x * (i + 2)).detach()
            norms.append(torch.nn.utils.clip_grad_norm_(xs, 0.5, p, foreach=foreach))
        assert_parity(norms[1], norms[0], rtol=TOLERANCE, name=f"norm {p}")
        assert_parity([x.grad for x in mixed], [x.grad for x in plain], rtol=TOLERANCE, name=f"clipped, {p}")


@distributed(2, backends=TORCH)
def test_a_plain_tensor_is_written_with_numbers_that_are_dtensors_and_with_no_others(world: World) -> None:
    mesh = _mesh(world)
    x = torch.ones(3, dtype=torch.float64, device=world.device)
    half = torch.tensor(0.5, dtype=torch.float64, device=world.device)
    for at in (Replicate(), Partial()):
        assert_parity(x.clone().mul_(distribute_tensor(half, mesh, [at])), x * 0.5, rtol=TOLERANCE)
    for wrong in (distribute_tensor(x, mesh), distribute_tensor(half, mesh).requires_grad_()):
        with pytest.raises(ValueError, match="would write DTensors into a plain tensor"):
            x.mul_(wrong)
    assert_parity(x.clone().add_(other=distribute_tensor(half, mesh)), x + 0.5, rtol=TOLERANCE)


FUSED: dict[str, tuple[int, dict[str, Any]]] = {
    "adam": (
        4,
        {
            "lr": 0.1,
            "beta1": 0.9,
            "beta2": 0.99,
            "weight_decay": 0.1,
            "eps": 1e-8,
            "amsgrad": False,
            "maximize": False,
        },
    ),
    "sgd": (
        3,
        {
            "lr": 0.1,
            "momentum": 0.9,
            "weight_decay": 0.1,
            "dampening": 0.0,
            "nesterov": True,
            "maximize": False,
        },
    ),
    "adagrad": (3, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}),
}


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "adagrad"])
@distributed(2, backends=TORCH)
def test_fused_optimizers_write_the_unsharded_values(name: str, world: World) -> None:
    count, options = FUSED["adam" if name == "adamw" else name]
    plain, cut = _lists(world, count)
    for lists in (plain, cut):
        steps = [torch.ones((), device=world.device) for _ in SHAPES]
        extra: list[Any] = {"adam": [[], steps], "adagrad": [steps], "sgd": []}[
            "adam" if name == "adamw" else name
        ]
        more = {"is_first_step": False} if name == "sgd" else {}
        getattr(torch, f"_fused_{name}_")(*lists, *extra, **options, **more)
    for found, expected in zip(cut, plain, strict=True):
        _same(found, expected, name)
