"""Point-to-point transfers, alone and in batches."""

import torch
import torch.distributed as dist
from cases import case, equal, filled, rank, world


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
