"""Reading and writing parts of DTensors: the values and gradients of the unsharded program, and no communication where none is needed."""

from typing import Any

import pytest

from hp_dtensor import (
    DTensor,
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    SkipDTensorDispatch,
    check_spmd,
    distribute_tensor,
)
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

PLACEMENTS: list[Placement] = [Shard(0), Shard(1), Replicate(), Partial()]
EXACT = {"atol": 0.0, "rtol": 0.0}


def _whole(world: World, *shape: int) -> Any:
    """Quarters from -3 to 3: exact in every sum of these tests."""
    count = 1
    for n in shape:
        count = count * n
    values = [((i * 7) % 25 - 12) / 4 for i in range(count)]
    return world.platform.reshape(world.platform.tensor(values, "float32", world.device), shape)


def _numbers(world: World, values: list[int]) -> Any:
    return world.platform.tensor(values, "int64", world.device)


READS: dict[str, Any] = {
    "an int": lambda x, n, m: x[3],
    "two ints": lambda x, n, m: x[-1, 1],
    "a column": lambda x, n, m: x[:, 1],
    "a slice": lambda x, n, m: x[1:4],
    "half": lambda x, n, m: x[:2],
    "steps": lambda x, n, m: x[::2, 1:],
    "new dims": lambda x, n, m: x[None, 2:, None],
    "all": lambda x, n, m: x[...],
    "a list": lambda x, n, m: x[[0, 4, 2]],
    "numbers": lambda x, n, m: x[n],
    "columns by numbers": lambda x, n, m: x[1:3, n],
    "a mask": lambda x, n, m: x[m],
}


@distributed([2, 3])
def test_a_part_read_has_the_values_of_the_unsharded_one(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    x, numbers = _whole(world, 5, 3), _numbers(world, [2, 0, 1, 2])
    mask = x > 0
    for at in PLACEMENTS:
        for name, read in READS.items():
            sharded = distribute_tensor(x, mesh, [at])
            sharded_mask = distribute_tensor(mask, mesh, [Replicate() if at.is_partial() else at])
            for given in ((numbers, mask), (distribute_tensor(numbers, mesh, [Shard(0)]), sharded_mask)):
                assert_parity(read(sharded, *given), read(x, numbers, mask), name=f"{name} of {at}", **EXACT)


WRITES: dict[str, Any] = {
    "an int": lambda x, v, n, m: x.__setitem__(3, v[0]),
    "a column": lambda x, v, n, m: x.__setitem__((slice(None), 1), 2.5),
    "a slice": lambda x, v, n, m: x.__setitem__(slice(1, 4), v[:3]),
    "steps": lambda x, v, n, m: x.__setitem__((slice(None, None, 2), slice(1, None)), 0.5),
    "all": lambda x, v, n, m: x.__setitem__(Ellipsis, v),
    "numbers": lambda x, v, n, m: x.__setitem__(n, v[:4]),
    "one mask": lambda x, v, n, m: x.__setitem__(m, -1.0),
}


@distributed([2, 3])
def test_a_part_written_changes_the_target_where_it_lies(world: World) -> None:
    platform, mesh = world.platform, init_device_mesh(world.device_type, (world.size,))
    x, v = _whole(world, 5, 3), _whole(world, 5, 3) * 2 + 1
    numbers, mask = _numbers(world, [2, 0, 4, 1]), x > 0
    with platform.no_grad():
        for name, write in WRITES.items():
            whole = platform.clone(x)
            write(whole, v, numbers, mask)
            for at in PLACEMENTS:
                for of_value in (Replicate(), Shard(0)):
                    target = distribute_tensor(x, mesh, [at])
                    memory = platform.data_ptr(target.to_local())
                    write(target, distribute_tensor(v, mesh, [of_value]), numbers, mask)
                    label = f"{name} of {at} with {of_value}"
                    assert target.placements == (at,), label
                    assert platform.data_ptr(target.to_local()) == memory, label
                    assert_parity(target, whole, name=label, **EXACT)


@distributed(2)
def test_what_keeps_its_cut_moves_nothing(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    rows = distribute_tensor(_whole(world, 4, 6), mesh, [Shard(0)])
    columns = distribute_tensor(_whole(world, 4, 6), mesh, [Shard(1)])
    numbers = distribute_tensor(_numbers(world, [2, 0, 1, 3]), mesh, [Replicate()])
    with count_collectives() as record, world.platform.no_grad():
        assert rows[:, 1].placements == (Shard(0),)
        assert rows[:, None, ::2].placements == (Shard(0),)
        assert columns[1].placements == (Shard(0),)
        assert columns[numbers].placements == (Shard(1),)
        # Every other row, two on each rank before and one after.
        assert rows[::2].placements == (Shard(0),)
        # Of one row, and of rows by numbers, every rank gives what it has.
        assert rows[3].placements == (Partial(),)
        assert rows[numbers].placements == (Partial(),)
        rows[:, 2] = 1.0
        rows[1:] = 2.0
        columns[numbers] = 0.5
    record.assert_counts()


@pytest.mark.parametrize("at", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
@distributed([2, 3], backends=["torch", "cuda", "npu"])
def test_writes_are_recorded_for_backward_on_ranks_that_write_nothing_too(
    world: World, at: Placement
) -> None:
    platform, mesh = world.platform, init_device_mesh(world.device_type, (world.size,))
    x, v, numbers = _whole(world, 2, 3), _whole(world, 2, 3) * 2 + 1, _numbers(world, [1])
    grads = []
    for sharded in (False, True):
        leaves = [platform.set_requires_grad_(platform.clone(t), True) for t in (x, v)]
        if sharded:
            leaves = [
                platform.set_requires_grad_(distribute_tensor(t, mesh, [Shard(0)]).detach(), True)
                for t in (x, v)
            ]
        first, second = leaves
        target = first * 2.0
        if sharded:
            target = target.redistribute(placements=[at])
        target[0] = second[1]
        target[:, 1:] = second[:, :2] * 3.0
        target[numbers] = second[:1] * 0.5
        target[:, 0] = 1.0
        (target * target).sum().backward()
        grads.append([t.grad.full_tensor() if sharded else platform.get_grad(t) for t in leaves])
    for plain, of_shards in zip(*grads, strict=True):
        assert_parity(of_shards, plain, **EXACT)


@distributed(2, backends=["torch", "cuda", "npu"])
def test_a_part_that_keeps_its_cut_shares_memory_with_its_base(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    x = _whole(world, 5, 3)
    sharded = distribute_tensor(x, mesh, [Shard(0)])
    x = world.platform.clone(x)
    for t in (x, sharded):
        t[:, 1:].mul_(2.0)
        t[:, 0].zero_()
        t.unbind(1)[1].fill_(3.0)
    assert_parity(sharded, x, **EXACT)


@distributed(2)
def test_a_plain_tensor_is_the_whole_for_copy(world: World) -> None:
    platform, mesh = world.platform, init_device_mesh(world.device_type, (2,))
    x, v = _whole(world, 5, 3), _whole(world, 5, 3) * 2 + 1
    with platform.no_grad():
        for at in PLACEMENTS:
            target = distribute_tensor(x, mesh, [at])
            assert target.copy_(v) is target
            assert_parity(target, v, name=str(at), **EXACT)
            target.copy_(distribute_tensor(x, mesh, [Shard(1)]))
            assert_parity(target, x, name=str(at), **EXACT)
            target.fill_(1.5)
            assert_parity(target, x * 0 + 1.5, name=str(at), **EXACT)
            target.zero_()
            assert_parity(target, x * 0, name=str(at), **EXACT)
        for at in (Partial("prod"), Partial("max"), RaggedShard((0,), (4, 1))):
            target = distribute_tensor(x, mesh, [Replicate()]).redistribute(placements=[at])
            assert_parity(target.fill_(1.5).full_tensor(), x * 0 + 1.5, name=str(at), **EXACT)
            assert_parity(target.copy_(v).full_tensor(), v, name=str(at), **EXACT)
            assert_parity(target.zero_().full_tensor(), x * 0, name=str(at), **EXACT)
            assert target.placements == (at,)


@distributed(2)
def test_whole_writes_follow_skipped_dispatch_and_check_spmd(world: World) -> None:
    platform, mesh = world.platform, init_device_mesh(world.device_type, (2,))
    x = distribute_tensor(_whole(world, 5, 3), mesh, [Shard(0)])
    own = platform.clone(platform.detach(x.to_local()))
    with platform.no_grad():
        for write in (lambda: x.copy_(own * 2), lambda: x.fill_(3.0), lambda: x.zero_()):
            with SkipDTensorDispatch():
                assert not isinstance(write(), DTensor)
        assert_parity(x.full_tensor(), _whole(world, 5, 3) * 0, **EXACT)
        with check_spmd(), pytest.raises(RuntimeError, match="copy_"):
            x.copy_(DTensor.from_local(own[:1] * 0 + world.rank, mesh, [Replicate()]))


@distributed(2, backends=["torch", "cuda", "npu"])
def test_a_plain_tensor_is_not_written_from_dtensors(world: World) -> None:
    x = distribute_tensor(_whole(world, 5, 3), init_device_mesh(world.device_type, (2,)), [Shard(0)])
    plain = _whole(world, 5, 3)
    for write in (lambda: plain.copy_(x), lambda: plain.add_(x), lambda: plain.__setitem__(0, x[0])):
        with pytest.raises(ValueError, match="plain tensor"):
            write()


@distributed(2)
def test_what_does_not_fit_is_told(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    x = distribute_tensor(_whole(world, 5, 3), mesh, [Shard(0)])
    with pytest.raises(IndexError, match=r"index 5 is out of range for dim 0 of size 5"):
        x[5]
    with pytest.raises(IndexError, match=r"an index for 3 dims does not fit a tensor with 2 dims"):
        x[0, 0, 0]
    with pytest.raises(IndexError, match=r"a mask of shape \(3,\) does not fit"):
        x[distribute_tensor(_whole(world, 3) > 0, mesh, [Replicate()])]
    with pytest.raises(ValueError, match=r"a value of shape \(2,\) does not fit a part of shape \(3,\)"):
        x[1] = distribute_tensor(_whole(world, 2), mesh, [Replicate()])
    with pytest.raises(ValueError, match=r"a slice must go forward, got step -1: use flip\(\)"):
        x[::-1]
    with pytest.raises(ValueError, match="an index is an int, a slice"):
        x["rows"]
