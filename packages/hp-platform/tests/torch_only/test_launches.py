"""Raw launches of torch.distributed: dtypes that no backend names, work handles, what is left untouched, time-outs."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from hp_platform.testing import World, distributed

TORCH = ("torch", "cuda", "npu")
# float8 and complex are in no backend's list, int16 in HCCL's alone: they travel as bytes.
# Where int16 is reduced, it is as int32.
MOVED = ("float32", "float64", "bfloat16", "int16", "int8", "bool", "complex64", "float8_e4m3fn")
SIZES = {
    "rising": lambda w: list(range(w)),
    "last empty": lambda w: [2] * (w - 1) + [0],
    "first only": lambda w: [1] + [0] * (w - 1),
}


def full(world: World, shape: tuple[int, ...], value: float, dtype: str) -> torch.Tensor:
    return torch.full(shape, value).to(getattr(torch, dtype)).to(world.device)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit: float8 has no comparison of its own."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    got, want = (x.cpu().unsqueeze(-1).view(torch.uint8) for x in (actual, expected))
    assert torch.equal(got, want), (actual, expected)


def finish(work: Any, async_op: bool) -> None:
    assert (work is None) is not async_op
    if work is not None:
        work.wait()
        # An accelerator's wait orders streams; the host sees the end a little later.
        limit = time.monotonic() + 10
        while not work.is_completed():
            assert time.monotonic() < limit, f"{type(work).__name__} never says that it is completed"


@distributed((2, 3), backends=TORCH)
@pytest.mark.parametrize("async_op", [False, True])
def test_data_of_any_dtype_moves(world: World, async_op: bool) -> None:
    for dtype in MOVED:
        move_by_collectives(world, dtype, async_op)


def move_by_collectives(world: World, dtype: str, async_op: bool) -> None:
    p, w, r, g = world.platform, world.size, world.rank, world.group.native
    x = full(world, (2, 3), r, dtype)
    out = torch.empty_like(x).repeat(w, 1)
    finish(p.all_gather_into(out, x, g, async_op), async_op)
    same(out, torch.cat([full(world, (2, 3), i, dtype) for i in range(w)]))
    same(x, full(world, (2, 3), r, dtype))

    out = full(world, (w,), 0, dtype)
    finish(p.all_gather_into(out, full(world, (), r, dtype), g, async_op), async_op)
    same(out, torch.stack([full(world, (), i, dtype) for i in range(w)]))

    for tail in ((), (2,)):
        counts = [(r + i) % 3 for i in range(w)]
        x = torch.cat([full(world, (counts[i], *tail), r * w + i, dtype) for i in range(w)])
        out = torch.empty_like(x)
        finish(p.all_to_all_into(out, x, counts, counts, g, async_op), async_op)
        same(out, torch.cat([full(world, (counts[i], *tail), i * w + r, dtype) for i in range(w)]))

    x = full(world, (3,), r, dtype)
    finish(p.broadcast_(x, w - 1, g, async_op), async_op)
    same(x, full(world, (3,), w - 1, dtype))

    out = full(world, (3,), 7, dtype)
    blocks = [full(world, (3,), i, dtype) for i in range(w)]
    finish(p.scatter_into(out, blocks if r == 1 else None, 1, g, async_op), async_op)
    same(out, blocks[r])
    outs = [full(world, (3,), 7, dtype) for _ in range(w)] if r == 1 else None
    finish(p.gather_into(outs, full(world, (3,), r, dtype), 1, g, async_op), async_op)
    for i, got in enumerate(outs or []):
        same(got, full(world, (3,), i, dtype))


@distributed((2, 3), backends=TORCH)
@pytest.mark.parametrize("async_op", [False, True])
def test_data_moves_between_two_ranks(world: World, async_op: bool) -> None:
    for dtype in ("float32", "int16", "float8_e4m3fn"):
        move_between_two(world, dtype, async_op)


def move_between_two(world: World, dtype: str, async_op: bool) -> None:
    p, w, r, g = world.platform, world.size, world.rank, world.group.native
    got = full(world, (3,), 0, dtype)
    if r == 0:
        finish(p.send(full(world, (3,), 7, dtype), 1, g, async_op), async_op)
    if r == 1:
        finish(p.recv_(got, 0, g, async_op), async_op)
        same(got, full(world, (3,), 7, dtype))
    assert list(p.batch_p2p([], g)) == []
    works = p.batch_p2p([("recv", got, (r - 1) % w), ("send", full(world, (3,), r, dtype), (r + 1) % w)], g)
    for work in works:
        work.wait()
    same(got, full(world, (3,), (r - 1) % w, dtype))


@distributed((2, 3), backends=TORCH)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_uneven_blocks_are_gathered_and_reduced(world: World, sizes: str, async_op: bool) -> None:
    for dtype in MOVED:
        gather_and_reduce_uneven(world, SIZES[sizes](world.size), dtype, async_op)


def gather_and_reduce_uneven(world: World, counts: list[int], dtype: str, async_op: bool) -> None:
    p, w, r, g = world.platform, world.size, world.rank, world.group.native
    outs = [full(world, (n, 3), 9, dtype) for n in counts]
    finish(p.all_gather_uneven_into(outs, full(world, (counts[r], 3), r, dtype), g, async_op), async_op)
    for i, out in enumerate(outs):
        same(out, full(world, (counts[i], 3), i, dtype))
    if not p.can_reduce(getattr(torch, dtype), world.device_type):
        return
    blocks = [full(world, (n, 3), r + i, dtype) for i, n in enumerate(counts)]
    out = full(world, (counts[r], 3), 9, dtype)
    finish(p.reduce_scatter_uneven_into(out, blocks, "sum", g, async_op), async_op)
    same(out, full(world, (counts[r], 3), w * r + sum(range(w)), dtype))
    for i, block in enumerate(blocks):
        same(block, full(world, (counts[i], 3), r + i, dtype))


@distributed((2, 3), backends=TORCH)
@pytest.mark.parametrize("async_op", [False, True])
def test_what_a_backend_says_it_reduces_it_reduces(world: World, async_op: bool) -> None:
    for op in ("sum", "max", "min", "prod", "mean"):
        reduce_all(world, op, async_op)


def reduce_all(world: World, op: str, async_op: bool) -> None:
    p, w, r, g = world.platform, world.size, world.rank, world.group.native
    if op not in p.native_reduce_ops(world.device_type):
        assert op == "mean", "only a mean may be left to the layer above"
        return
    values = torch.arange(1, w + 1).double()
    reduced = {
        "sum": values.sum(),
        "max": values.max(),
        "min": values.min(),
        "prod": values.prod(),
        "mean": values.mean(),
    }
    reducible = world.platform.device(world.device_type).comm.reducible
    for dtype in sorted(reducible, key=str):
        # HCCL multiplies neither 16-bit integers nor bfloat16 on every chip; a mean is for floating dtypes.
        if (op == "mean" and not dtype.is_floating_point) or (
            op == "prod" and dtype in (torch.int16, torch.bfloat16)
        ):
            continue
        name = p.dtype_name(dtype)
        expected = float(reduced[op])
        x = full(world, (5,), r + 1, name)
        finish(p.all_reduce_(x, op, g, async_op), async_op)
        same(x, full(world, (5,), expected, name))
        x, out = full(world, (2 * w, 3), r + 1, name), full(world, (2, 3), 0, name)
        finish(p.reduce_scatter_into(out, x, op, g, async_op), async_op)
        same(out, full(world, (2, 3), expected, name))
        same(x, full(world, (2 * w, 3), r + 1, name))


@distributed(2, backends=TORCH)
@pytest.mark.parametrize("async_op", [False, True])
def test_several_collectives_go_in_one_launch(world: World, async_op: bool) -> None:
    p, w, r, g = world.platform, world.size, world.rank, world.group.native
    if not p.can_coalesce(world.device_type):
        assert not p.supports("coalesced", world.device_type)
        return
    xs = [full(world, (n,), r, "float32") for n in (1, 4)]
    finish(p.all_reduce_coalesced_(xs, "sum", g, async_op), async_op)
    for n, x in zip((1, 4), xs, strict=True):
        same(x, full(world, (n,), sum(range(w)), "float32"))
    xs = [
        full(world, (n,), r, dtype)
        for n, dtype in ((1, "float32"), (4, "float32"), (2, "bfloat16"), (3, "int16"))
    ]
    outs = [torch.empty(w * x.shape[0], dtype=x.dtype, device=x.device) for x in xs]
    finish(p.all_gather_coalesced_into(outs, xs, g, async_op), async_op)
    for x, out in zip(xs, outs, strict=True):
        same(out, torch.cat([torch.full_like(x, i) for i in range(w)]))
    xs = [full(world, (w * n, 2), r, "float32") for n in (1, 3)]
    outs = [full(world, (n, 2), 9, "float32") for n in (1, 3)]
    finish(p.reduce_scatter_coalesced_into(outs, xs, "sum", g, async_op), async_op)
    for out in outs:
        same(out, torch.full_like(out, sum(range(w))))


@distributed((2, 3), backends=TORCH)
@pytest.mark.parametrize("async_op", [False, True])
def test_several_exchanges_fill_parts_of_a_larger_tensor(world: World, async_op: bool) -> None:
    """Block i of rank r for rank s holds 10 i + 100 r + s."""
    p, w, r, g = world.platform, world.size, world.rank, world.group.native
    if not p.can_exchange_lists(world.device_type):
        assert world.device_type != "cuda"
        return
    xs = [
        torch.cat([full(world, (n,), 10 * i + 100 * r + s, "bfloat16") for s in range(w)])
        for i, n in enumerate((1, 3))
    ]
    landed = full(world, (w, 4), -1, "bfloat16")
    blocks = [[row[:1] for row in landed], [row[1:] for row in landed]]
    parts = [list(x.split(n)) for x, n in zip(xs, (1, 3), strict=True)]
    finish(p.all_to_all_coalesced_into(blocks, parts, g, async_op), async_op)
    for sender, row in enumerate(landed):
        same(
            row,
            torch.cat(
                [full(world, (n,), 10 * i + 100 * sender + r, "bfloat16") for i, n in enumerate((1, 3))]
            ),
        )


@distributed(2, backends=TORCH)
def test_launches_record_no_gradient(world: World) -> None:
    p, g = world.platform, world.group.native
    leaf = torch.ones(4, device=world.device, requires_grad=True)
    x = leaf * 2
    p.all_reduce_(x, "sum", g, False)
    out = torch.empty(8, device=world.device)
    p.all_gather_into(out, x, g, False)
    assert not out.requires_grad
    assert out.tolist() == [4.0] * 8


@distributed(2, backends=TORCH)
def test_a_gather_fills_a_view_of_a_larger_tensor(world: World) -> None:
    p, r, g = world.platform, world.rank, world.group.native
    base = torch.zeros(4, 2, device=world.device)
    p.all_gather_into(base[1:3], torch.full((1, 2), r + 1.0, device=world.device), g, False)
    assert base.tolist() == [[0, 0], [1, 1], [2, 2], [0, 0]]


@distributed(2, backends=TORCH)
@pytest.mark.parametrize("async_op", [False, True])
def test_a_barrier_waits_for_the_last_rank(world: World, async_op: bool) -> None:
    p, g = world.platform, world.group.native
    p.barrier(g, False)
    if world.rank == 1:
        time.sleep(0.3)
    start = time.monotonic()
    work = p.barrier(g, async_op)
    if work is not None:
        work.wait()
    if world.rank == 0:
        assert time.monotonic() - start > 0.2


@distributed(3, backends="torch")
def test_a_group_is_made_by_its_members_alone(world: World) -> None:
    p = world.platform
    if world.rank == 1:
        return
    group = p.new_group((0, 2), timedelta(seconds=20))
    assert p.native_ranks(group) == (0, 2)
    assert p.native_rank(group) == (0 if world.rank == 0 else 1)
    x = torch.ones(2)
    p.all_reduce_(x, "sum", group, False)
    assert x.tolist() == [2.0, 2.0]
    p.destroy_group(group)


@distributed(2, backends=TORCH)
def test_the_store_is_read_without_waiting(world: World) -> None:
    p, store = world.platform, world.group.tables.store
    assert p.store_get(store, "torch-only/nobody") is None
    if world.rank == 1:
        p.store_set(store, "torch-only/key", b"\x00value")
    p.barrier(world.group.native, False)
    assert p.store_get(store, "torch-only/key") == b"\x00value"
    p.barrier(world.group.native, False)


@distributed(2, backends="torch", isolated=True)
def test_gloos_time_out_is_recognised(world: World) -> None:
    p = world.platform
    group = p.new_group((0, 1), timedelta(seconds=1))
    if world.rank == 0:
        with pytest.raises(RuntimeError) as caught:
            p.all_reduce_(torch.ones(2), "sum", group, False)
        assert p.is_timeout(caught.value), caught.value
        p.store_set(world.group.tables.store, "torch-only/over", b"1")
    else:
        limit = time.monotonic() + 20
        while p.store_get(world.group.tables.store, "torch-only/over") is None:
            assert time.monotonic() < limit
            time.sleep(0.05)


def test_other_errors_are_no_time_outs() -> None:
    from hp_platform.torch import build_platform

    p = build_platform()
    assert p.is_timeout(TimeoutError())
    assert p.is_timeout(ConnectionResetError())
    for text in (
        "Connection closed by peer [127.0.0.1]:48293",
        "Read error [127.0.0.1]:37796: Connection reset by peer",
        "Timed out waiting 1000ms for recv operation to complete",
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE) ran for 10001 milliseconds",
        "NCCL error: remote process exited or there was a network error",
    ):
        assert p.is_timeout(RuntimeError(text)), text
    for error in (
        RuntimeError("Invalid scalar type"),
        RuntimeError("CUDA out of memory"),
        ValueError("timeout must be positive"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ):
        assert not p.is_timeout(error), error
