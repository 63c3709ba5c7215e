"""What every rank does in test_collectives.py: one function per case, each checks its own result."""

import traceback
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

CASES: dict[str, Callable[[torch.device], None]] = {}


def case(function: Callable[[torch.device], None]) -> Callable[[torch.device], None]:
    CASES[function.__name__] = function
    return function


def run_all(device: torch.device) -> dict[str, str]:
    """Every case on one process group: its name and "ok", or how it failed."""
    results = {}
    for name, function in CASES.items():
        try:
            function(device)
            results[name] = "ok"
        except BaseException:
            results[name] = traceback.format_exc()
    return results


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def filled(device: torch.device, value: float, count: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((count,), value, device=device).to(dtype)


def equal(given: Tensor, expected: list[float]) -> None:
    assert given.tolist() == expected, f"{given.tolist()} instead of {expected}"


REDUCED_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.int8, torch.uint8]


@case
def all_reduce_sums_every_dtype(device: torch.device) -> None:
    for dtype in REDUCED_DTYPES:
        x = filled(device, rank() + 1, dtype=dtype)
        dist.all_reduce(x)
        equal(x, [sum(range(1, world() + 1))] * 4)


@case
def all_reduce_knows_every_operation_of_hccl(device: torch.device) -> None:
    expected = {"SUM": sum(range(1, world() + 1)), "MAX": world(), "MIN": 1, "AVG": (world() + 1) / 2}
    expected["PRODUCT"] = torch.arange(1, world() + 1).prod().item()
    for name, value in expected.items():
        x = filled(device, rank() + 1)
        dist.all_reduce(x, getattr(dist.ReduceOp, name))
        equal(x, [value] * 4)


@case
def premultiplied_sum_scales_before_adding(device: torch.device) -> None:
    x = filled(device, 1.0)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    equal(x, [0.5 * world()] * 4)


@case
def bool_is_cast_and_reduced(device: torch.device) -> None:
    x = torch.tensor([True, rank() == 0, False], device=device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    equal(x, [True, True, False])


@case
def half_precision_is_rounded_once(device: torch.device) -> None:
    for dtype, tiny in ((torch.bfloat16, 2**-9), (torch.float16, 2**-12)):
        x = filled(device, 1.0 if rank() == 0 else tiny, dtype=dtype)
        dist.all_reduce(x)
        exact = torch.tensor(1.0 + tiny * (world() - 1)).to(dtype).item()
        equal(x, [exact] * 4)


@case
def float16_covers_subnormal_and_infinite_numbers(device: torch.device) -> None:
    values = [2**-24, 6e-5, 65504.0, -0.25, float("inf")]
    x = torch.tensor(values, device=device).to(torch.float16) if rank() == 0 else filled(device, 0, 5, torch.float16)
    dist.all_reduce(x)
    equal(x, torch.tensor(values).to(torch.float16).tolist())


@case
def float64_is_refused(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="Unsupported data type at::kDouble"):
        dist.all_reduce(filled(device, 1.0, dtype=torch.float64))


@case
def average_of_integers_is_refused(device: torch.device) -> None:
    x = filled(device, rank(), dtype=torch.int32)
    with pytest.raises(RuntimeError, match="can't be cast"):
        dist.all_reduce(x, dist.ReduceOp.AVG)


@case
def bitwise_operations_are_refused(device: torch.device) -> None:
    for name in ("BAND", "BOR", "BXOR"):
        with pytest.raises(RuntimeError, match="Cannot use ReduceOp"):
            dist.all_reduce(filled(device, 1, dtype=torch.int32), getattr(dist.ReduceOp, name))


@case
def non_contiguous_tensors_are_refused(device: torch.device) -> None:
    with pytest.raises((RuntimeError, ValueError), match="contiguous"):
        dist.all_reduce(torch.ones(4, 2, device=device).t())


@case
def cpu_tensors_are_refused(device: torch.device) -> None:
    with pytest.raises((RuntimeError, ValueError), match="(?i)npu|backend"):
        dist.all_reduce(torch.ones(4))


@case
def all_gather_orders_by_rank(device: torch.device) -> None:
    for dtype in (*REDUCED_DTYPES, torch.bool):
        out = torch.empty(world() * 2, device=device, dtype=dtype)
        dist.all_gather_into_tensor(out, filled(device, rank(), 2, dtype))
        expected = torch.arange(world()).repeat_interleave(2).to(dtype)
        equal(out, expected.tolist())


@case
def all_gather_fills_a_list(device: torch.device) -> None:
    out = [torch.empty(2, device=device) for _ in range(world())]
    dist.all_gather(out, filled(device, rank(), 2))
    equal(torch.stack(out)[:, 0], list(range(world())))


@case
def all_gather_takes_uneven_parts(device: torch.device) -> None:
    out = [torch.empty(r + 1, device=device) for r in range(world())]
    dist.all_gather(out, filled(device, rank(), rank() + 1))
    for r, part in enumerate(out):
        equal(part, [r] * (r + 1))


@case
def reduce_scatter_gives_each_rank_its_part(device: torch.device) -> None:
    for op, factor in ((dist.ReduceOp.SUM, world()), (dist.ReduceOp.AVG, 1)):
        out = torch.empty(2, device=device)
        dist.reduce_scatter_tensor(out, torch.arange(2.0 * world(), device=device), op=op)
        equal(out, [2 * rank() * factor, (2 * rank() + 1) * factor])


@case
def reduce_scatter_takes_a_list(device: torch.device) -> None:
    out = torch.empty(2, device=device)
    dist.reduce_scatter(out, [filled(device, r, 2) for r in range(world())])
    equal(out, [rank() * world()] * 2)


@case
def all_to_all_transposes(device: torch.device) -> None:
    out = torch.empty(world(), device=device)
    dist.all_to_all_single(out, torch.arange(float(world()), device=device) + 10 * rank())
    equal(out, [10.0 * r + rank() for r in range(world())])


@case
def all_to_all_takes_uneven_splits(device: torch.device) -> None:
    sent, received = [rank() + 1] * world(), [r + 1 for r in range(world())]
    out = torch.empty(sum(received), device=device)
    dist.all_to_all_single(out, filled(device, rank(), sum(sent)), received, sent)
    equal(out, [r for r in range(world()) for _ in range(r + 1)])


@case
def all_to_all_takes_empty_splits(device: torch.device) -> None:
    sent = [2 if r == 0 else 0 for r in range(world())]
    received = [2] * world() if rank() == 0 else [0] * world()
    out = torch.empty(sum(received), device=device)
    dist.all_to_all_single(out, filled(device, rank(), 2), received, sent)
    equal(out, [r for r in range(world()) for _ in range(2)] if rank() == 0 else [])


@case
def all_to_all_takes_lists(device: torch.device) -> None:
    out = [torch.empty(2, device=device) for _ in range(world())]
    dist.all_to_all(out, [filled(device, 10 * rank() + r, 2) for r in range(world())])
    equal(torch.stack(out)[:, 0], [10.0 * r + rank() for r in range(world())])


@case
def broadcast_copies_from_the_source(device: torch.device) -> None:
    source = world() - 1
    for dtype in (*REDUCED_DTYPES, torch.bool):
        x = filled(device, rank() + 1, dtype=dtype)
        dist.broadcast(x, source)
        equal(x, filled(device, world(), dtype=dtype).tolist())


@case
def reduce_writes_on_the_destination(device: torch.device) -> None:
    x = filled(device, rank() + 1)
    dist.reduce(x, 0)
    if rank() == 0:
        equal(x, [sum(range(1, world() + 1))] * 4)


@case
def scatter_and_gather_are_inverse(device: torch.device) -> None:
    part = torch.empty(2, device=device)
    dist.scatter(part, [filled(device, r, 2) for r in range(world())] if rank() == 0 else None, src=0)
    equal(part, [rank()] * 2)
    out = [torch.empty(2, device=device) for _ in range(world())] if rank() == 0 else None
    dist.gather(part, out, dst=0)
    if out is not None:
        equal(torch.stack(out)[:, 0], list(range(world())))


@case
def barrier_returns(device: torch.device) -> None:
    dist.barrier()


@case
def send_and_recv_pair_up(device: torch.device) -> None:
    x = filled(device, rank() + 5)
    if rank() == 0:
        dist.send(x, 1)
    elif rank() == 1:
        dist.recv(x, 0)
        equal(x, [5.0] * 4)


@case
def isend_and_irecv_are_awaited(device: torch.device) -> None:
    x = filled(device, rank() + 7)
    if rank() < 2:
        work = dist.isend(x, 1) if rank() == 0 else dist.irecv(x, 0)
        assert work is not None
        work.wait()
        equal(x, [7.0] * 4)


@case
def batched_transfers_go_round_a_ring(device: torch.device) -> None:
    for count in (3, 300_000):  # the second one exceeds a socket's buffer
        received = torch.empty(count, device=device)
        ring = [
            dist.P2POp(dist.isend, filled(device, rank(), count), (rank() + 1) % world()),
            dist.P2POp(dist.irecv, received, (rank() - 1) % world()),
        ]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        equal(received[:3], [(rank() - 1) % world()] * 3)
        equal(received[-3:], [(rank() - 1) % world()] * 3)


@case
def batches_of_one_direction_form_a_pipeline(device: torch.device) -> None:
    x = filled(device, 1.0)
    ops = []
    if rank() > 0:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, rank() - 1)]):
            work.wait()
        x += 1
    if rank() < world() - 1:
        ops = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, rank() + 1)])
    for work in ops:
        work.wait()
    equal(x, [rank() + 1] * 4)


@case
def coalesced_collectives_all_complete(device: torch.device) -> None:
    a, b = filled(device, 1.0), filled(device, 2.0, 3)
    with dist._coalescing_manager(device=device, async_ops=True) as manager:
        dist.all_reduce(a)
        dist.all_reduce(b)
    manager.wait()
    equal(a, [world()] * 4)
    equal(b, [2 * world()] * 3)


@case
def coalesced_gathers_and_scatters_all_complete(device: torch.device) -> None:
    gathered = [torch.empty(world(), device=device) for _ in range(2)]
    with dist._coalescing_manager(device=device, async_ops=True) as manager:
        for scale, out in enumerate(gathered, 1):
            dist.all_gather_into_tensor(out, filled(device, scale * rank(), 1))
    manager.wait()
    for scale, out in enumerate(gathered, 1):
        equal(out, [scale * r for r in range(world())])
    parts = [torch.empty(1, device=device) for _ in range(2)]
    with dist._coalescing_manager(device=device, async_ops=True) as manager:
        for part in parts:
            dist.reduce_scatter_tensor(part, torch.arange(float(world()), device=device))
    manager.wait()
    for part in parts:
        equal(part, [rank() * world()])


@case
def async_work_completes_on_wait(device: torch.device) -> None:
    x = filled(device, 1.0)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    equal(x, [world()] * 4)
    torch.npu.synchronize()
    assert work.is_completed()


@case
def subgroups_work_beside_each_other(device: torch.device) -> None:
    pairs = [dist.new_group([r, r + 1]) for r in range(0, world(), 2)]
    mine = pairs[rank() // 2]
    for _ in range(2):
        x = filled(device, rank() + 1)
        dist.all_reduce(x, group=mine)
        first = rank() // 2 * 2
        equal(x, [2 * first + 3] * 4)
        y = filled(device, 1.0)
        dist.all_reduce(y)
        equal(y, [world()] * 4)


@case
def a_group_can_be_made_again(device: torch.device) -> None:
    for _ in range(2):
        group = dist.new_group(list(range(world())))
        x = filled(device, 1.0)
        dist.all_reduce(x, group=group)
        equal(x, [world()] * 4)
        dist.destroy_process_group(group)


@case
def objects_are_gathered_and_broadcast(device: torch.device) -> None:
    out: list[object] = [None] * world()
    dist.all_gather_object(out, {"rank": rank()})
    assert out == [{"rank": r} for r in range(world())]
    box = [{"from": 0}] if rank() == 0 else [None]
    dist.broadcast_object_list(box, 0)
    assert box == [{"from": 0}]


@case
def functional_collectives_work(device: torch.device) -> None:
    from torch.distributed import _functional_collectives as functional

    equal(functional.all_reduce(filled(device, 1.0), "sum", dist.group.WORLD), [world()] * 4)
    gathered = functional.all_gather_tensor(filled(device, rank(), 1), 0, dist.group.WORLD)
    equal(gathered, list(range(world())))


@case
def streams_share_a_communicator_in_issue_order(device: torch.device) -> None:
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    results = []
    for i in range(6):
        x = filled(device, i)
        side.wait_stream(torch.npu.current_stream())
        if (i + rank()) % 2:  # ranks use different streams for the same collective
            with torch.npu.stream(side):
                dist.all_reduce(x)
        else:
            dist.all_reduce(x)
        results.append(x)
    torch.npu.current_stream().wait_stream(side)
    for i, x in enumerate(results):
        equal(x, [i * world()] * 4)


@case
def fsdp_gradients_equal_one_process(device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def model() -> torch.nn.Sequential:
        torch.manual_seed(0)
        blocks = [torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)) for _ in range(2)]
        return torch.nn.Sequential(*blocks)

    torch.manual_seed(1)
    batch = torch.randn(world(), 4, 8)
    reference, sharded = model(), model().to(device)
    reference(batch.reshape(-1, 8)).pow(2).mean().backward()
    mesh = init_device_mesh("npu", (world(),))
    for block in sharded:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    sharded(batch[rank()].to(device)).pow(2).mean().backward()
    for expected, given in zip(reference.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(given.grad.full_tensor().cpu(), expected.grad, rtol=1e-5, atol=1e-7)


@case
def a_doubled_gradient_is_caught_by_comparing_gradients(device: torch.device) -> None:
    """Mutation: the reduce-scatter of FSDP adds where it should average. Losses after clipping would not show it."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    original = _fsdp_collectives._get_gradient_divide_factors

    def sums(*args: object, **kwargs: object) -> tuple[object, ...]:
        before, after, scatter_op, reduce_op = original(*args, **kwargs)
        assert scatter_op == dist.ReduceOp.AVG
        return before, after, dist.ReduceOp.SUM, reduce_op

    _fsdp_collectives._get_gradient_divide_factors = sums
    try:
        with pytest.raises(AssertionError, match="not close"):
            fsdp_gradients_equal_one_process(device)
    finally:
        _fsdp_collectives._get_gradient_divide_factors = original


@case
def distributed_checkpoint_restores_a_sharded_tensor(device: torch.device) -> None:
    import os

    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("npu", (world(),))
    value = torch.arange(16.0).reshape(4, 4)
    folder = os.path.join(os.path.dirname(os.environ["STORE"]), "checkpoint")
    checkpoint.save({"x": distribute_tensor(value.to(device), mesh, [Shard(0)])}, checkpoint_id=folder)
    loaded = {"x": distribute_tensor(torch.zeros(4, 4, device=device), mesh, [Shard(0)])}
    checkpoint.load(loaded, checkpoint_id=folder)
    equal(loaded["x"].full_tensor(), value.tolist())
