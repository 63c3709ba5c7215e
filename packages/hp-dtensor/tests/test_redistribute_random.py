"""Random meshes, shapes, sources and targets: redistribution equals cutting the whole tensor, and so do its gradients."""

import itertools
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hp_dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from hp_dtensor.cuts import with_stacks
from hp_dtensor.spec import local_block
from hp_platform import DeviceMesh
from hp_platform.testing import World, assert_parity, distributed

KINDS: list[Placement] = [
    Shard(0),
    Shard(1),
    Replicate(),
    *(Partial(op) for op in ("sum", "avg", "max", "min", "prod")),
]


@st.composite
def _ways(draw: st.DrawFn, mesh: tuple[int, ...]) -> tuple[Placement, ...]:
    """Any placements, with the cuts of a tensor dim in any order."""
    placements = [draw(st.sampled_from(KINDS)) for _ in mesh]
    stacks: list[list[int]] = [[], []]
    for i in draw(st.permutations(range(len(mesh)))):
        found = placements[i]
        if isinstance(found, Shard):
            stacks[found.dim].append(i)
    return with_stacks(placements, [tuple(stack) for stack in stacks], mesh)


@st.composite
def _cases(draw: st.DrawFn, num_ranks: int) -> Any:
    shapes = [shape for shape in itertools.product((1, 2, 4), repeat=2) if shape[0] * shape[1] == num_ranks]
    source = draw(st.sampled_from([(num_ranks,), *shapes]))
    target = source if draw(st.booleans()) else draw(st.sampled_from([(num_ranks,), *shapes]))
    order = draw(st.permutations(range(num_ranks))) if target != source else list(range(num_ranks))
    shape = (draw(st.integers(0, 9)), draw(st.integers(1, 4)))
    return source, draw(_ways(source)), target, order, draw(_ways(target)), shape


def _mesh(world: World, shape: tuple[int, ...], ranks: list[int]) -> DeviceMesh:
    rows = ranks if len(shape) == 1 else [ranks[i * shape[1] : (i + 1) * shape[1]] for i in range(shape[0])]
    return DeviceMesh(world.device_type, rows)


def _check(world: World, case: Any) -> None:
    p = world.platform
    from_shape, source, to_shape, order, target, shape = case
    name = f"{shape} from {source} on {from_shape} to {target} on {to_shape} of {order}"
    dtype = "float64" if p.supports("reduce_float64", world.device_type) else "float32"
    count = shape[0] * shape[1]
    full, seed = (
        p.reshape(p.tensor([float(start + i) for i in range(count)], dtype, world.device), shape)
        for start in (1, 7)
    )
    first = _mesh(world, from_shape, list(range(world.size)))
    second = _mesh(world, to_shape, list(order))
    local = p.set_requires_grad_(p.clone(distribute_tensor(full, first, source).to_local()), True)
    x = DTensor.from_local(local, first, source, shape=shape)
    y = x.redistribute(second, target)
    if not any(placement.is_partial() for placement in target):
        coordinate = second.get_coordinate()
        assert coordinate is not None
        sizes, offsets = local_block(shape, target, to_shape, coordinate)
        piece = full
        for dim in (0, 1):
            piece = p.narrow(piece, dim, offsets[dim], sizes[dim])
        assert_parity(y.to_local(), piece, exact=True, name=name)
    # Every number of ranks is a power of two, and so is what averages and ties divide by.
    assert_parity(y.full_tensor(), full, exact=True, name=name)
    if y.to_local() is not local and not any(placement.is_partial("prod") for placement in source):
        y.backward(seed)
        gradient = DTensor.from_local(p.get_grad(local), first, x._spec.grad.placements, shape=shape)
        assert_parity(gradient.full_tensor(), seed, exact=True, name=f"gradient, {name}")


@distributed(world_size=(2, 4), timeout=120)
def test_redistribution_equals_cutting_the_whole(world: World) -> None:
    @settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=60,
        suppress_health_check=list(HealthCheck),
    )
    @given(_cases(world.size))
    def check(case: Any) -> None:
        _check(world, case)

    check()
