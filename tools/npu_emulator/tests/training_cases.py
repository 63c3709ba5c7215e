"""What trainers build on collectives: FSDP2 and the distributed checkpoint."""

import pytest
import torch
import torch.distributed as dist
from cases import case, equal, rank, world


@case
def fsdp_gradients_equal_one_process(device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def model() -> torch.nn.Sequential:
        torch.manual_seed(0)
        blocks = [
            torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
            for _ in range(2)
        ]
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
