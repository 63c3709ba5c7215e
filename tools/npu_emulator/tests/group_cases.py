"""How operations are ordered and grouped: coalescing, waiting, streams, subgroups, objects."""

import torch
import torch.distributed as dist
from cases import case, equal, filled, rank, world


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
