"""Collectives and what they refuse: types, operations, layouts."""

import pytest
import torch
import torch.distributed as dist
from cases import REDUCED_DTYPES, case, equal, filled, rank, world


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
    x = (
        torch.tensor(values, device=device).to(torch.float16)
        if rank() == 0
        else filled(device, 0, 5, torch.float16)
    )
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
