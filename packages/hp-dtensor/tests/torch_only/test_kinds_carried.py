"""Partials that are no sums go through what only gives their values other places: values, gradients, and no communication."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hp_dtensor import DTensor, Partial, Replicate, Shard
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

TORCH = ("torch", "cuda")
KINDS = ("max", "min", "prod", "avg")
# Averages and products of at most four numbers below 4, and sums of two such gradients, in float64.
TOLERANCE = 1e-14
R = Replicate()

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "cat": lambda x, y: torch.cat([x, y, x]),
    "stack": lambda x, y: torch.stack([x, y], 1),
    "hstack": lambda x, y: torch.hstack((x, y)),
    "vstack": lambda x, y: torch.vstack((x, y)),
    "block_diag": lambda x, y: torch.block_diag(x, y),
    "broadcast_tensors": lambda x, y: torch.broadcast_tensors(x, y)[1],
    "roll": lambda x, _: x.roll(2, 0),
    "flip": lambda x, _: x.flip(0, 1),
    "rot90": lambda x, _: x.rot90(),
    "repeat": lambda x, _: x.repeat(2, 3),
    "repeat_interleave": lambda x, _: x.repeat_interleave(2, 0),
    "pad": lambda x, _: F.pad(x, (1, 2, 0, 1)),
    "pad by copies": lambda x, _: F.pad(x[None], (1, 2), "replicate"),
    "unfold": lambda x, _: x.unfold(0, 3, 1),
    "tril": lambda x, _: x.tril(),
    "diag_embed": lambda x, _: torch.diag_embed(x),
    "pixel_shuffle": lambda x, _: F.pixel_shuffle(x.reshape(4, 2, 2), 2),
    "clone": lambda x, _: x.clone(),
    "view": lambda x, _: x.reshape(2, 8).t()[1:],
}


def _locals(world: World) -> list[torch.Tensor]:
    """Two tensors, with ties between ranks at every third place, and zeros at some."""
    found = []
    for number in (1, 2):
        generator = torch.Generator().manual_seed(10 * number + world.rank)
        x = torch.rand((4, 4), generator=generator, dtype=torch.float64) * 4 - 2
        x.reshape(-1)[::3] = float(number)
        x[1, 1] = 0.0
        found.append(x.to(world.device))
    return found


def _check(world: World, mesh: Any, call: Callable[[Any, Any], Any], lies: list[Any], moves: bool) -> Any:
    """The call's result, after it was compared with that of tensors that were reduced before."""
    results, grads = [], []
    for reduced in (True, False):
        leaves = [x.requires_grad_() for x in _locals(world)]
        given = [DTensor.from_local(x, mesh, lies) for x in leaves]
        if reduced:
            given = [x.redistribute(placements=[R] * len(lies)) for x in given]
        with count_collectives() as counted:
            found = call(*given)
        if not reduced and not moves:
            counted.assert_counts()
        whole = found.full_tensor()
        weights = torch.arange(1.0, 1 + whole.numel(), dtype=torch.float64, device=world.device)
        (whole.reshape(-1) * weights).sum().backward()
        results.append((found, whole.detach()))
        grads.append([x.grad for x in leaves])
    assert_parity(results[1][1], results[0][1], rtol=TOLERANCE, atol=TOLERANCE, name="values")
    for own, expected in zip(grads[1], grads[0], strict=True):
        if expected is None:
            assert own is None or not own.any()
        else:
            assert_parity(own, expected, rtol=TOLERANCE, atol=TOLERANCE * 100, name="gradient")
    return results[1][0]


@distributed([2, 3], backends=TORCH)
def test_values_get_other_places_before_they_are_reduced(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    for name, call in CALLS.items():
        for kind in KINDS:
            found = _check(world, mesh, call, [Partial(kind)], moves=False)
            assert found.placements == (Partial(kind),), (name, kind)


@distributed([2, 3], backends=TORCH)
def test_a_negative_maximum_is_a_minimum_of_negatives(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    for kind, other in (("max", "min"), ("min", "max"), ("avg", "avg")):
        found = _check(world, mesh, lambda x, _: -x, [Partial(kind)], moves=False)
        assert found.placements == (Partial(other),)
    assert _check(world, mesh, lambda x, _: -x, [Partial("prod")], moves=True).placements == (R,)
    x = DTensor.from_local(_locals(world)[0], mesh, [Partial("max")])
    expected = -x.full_tensor()
    x.neg_()  # in place it stays as it lies
    assert x.placements == (Partial("max"),)
    assert_parity(x, expected, exact=True)


@distributed(4, backends=TORCH)
def test_kinds_of_two_mesh_dims_go_through_together(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2, 2))
    for lies in (["max", "sum"], ["sum", "max"], ["prod", "min"], ["min", "avg"]):
        placements = [Partial(kind) for kind in lies]
        for name in ("cat", "stack", "flip", "pad", "view"):
            found = _check(world, mesh, CALLS[name], placements, moves=False)
            assert found.placements == tuple(placements), (name, lies)
    found = _check(world, mesh, lambda x, _: -x, [Partial(), Partial("max")], moves=False)
    assert found.placements == (Partial(), Partial("min"))


@distributed(2, backends=TORCH)
def test_tensors_that_lie_otherwise_are_reduced_before_they_are_put_together(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    x, y = _locals(world)[0], torch.arange(16.0, dtype=torch.float64, device=world.device).reshape(4, 4)
    for other in (R, Shard(1), Partial(), Partial("min")):
        given = [DTensor.from_local(x, mesh, [Partial("max")]), DTensor.from_local(y, mesh, [R])]
        found = torch.cat([given[0], given[1].redistribute(placements=[other])])
        assert not found.placements[0].is_partial("max")
        assert_parity(found, torch.cat([t.full_tensor() for t in given]), rtol=TOLERANCE, atol=TOLERANCE)
