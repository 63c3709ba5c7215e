"""Products for weights that tensor parallel layers put off, where units reduce the gradients and checkpoints compute again."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_platform import init_device_mesh
from hp_platform.testing import World, count_collectives, distributed
from hp_recompute import checkpoint_wrapper

SIZES = (2, 6, 8)
"""Batch, sequence, features."""


@pytest.mark.parametrize(
    "wrap", ["units", "units of layers", "narrow units", "checkpoints", "checkpointed units"]
)
@pytest.mark.parametrize("sequence", [False, True], ids=["whole sequence", "cut sequence"])
@distributed(world_size=4, backends=("torch", "cuda"), timeout=240)
def test_gradients_have_the_bits_of_those_that_are_not_put_off(
    world: World, wrap: str, sequence: bool
) -> None:
    import torch

    from hp_tp import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
    from hp_tp.styles import put_off

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = SIZES[-1]
            self.norm = torch.nn.LayerNorm(width)
            self.gate, self.up = (torch.nn.Linear(width, 2 * width) for _ in range(2))
            self.down = torch.nn.Linear(2 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))

    mesh = init_device_mesh(world.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    plan: dict[str, Any] = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        from hp_dtensor import Shard

        plan = {
            "norm": SequenceParallel(),
            "gate": ColwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
    options: dict[str, Any] = {}
    if wrap == "narrow units":
        options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}

    def steps(least: int) -> tuple[list[Any], dict[str, int]]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(Block() for _ in range(2))).to(world.device, torch.float32)
        for block in model:
            parallelize_module(block, mesh["tp"], plan)
            if wrap.startswith("checkpoint"):
                checkpoint_wrapper(block)
            if wrap == "units of layers":
                for layer in (block.gate, block.up, block.down):
                    fully_shard(layer, mesh["dp"], **options)
            if wrap != "checkpoints":
                fully_shard(block, mesh["dp"], **options)
        found = []
        opened = put_off._opened
        with (
            patch.object(put_off, "MIN_NBYTES", least),
            patch.object(put_off, "_opened", wraps=opened) as doors,
            count_collectives() as counted,
        ):
            for step in range(2):
                generator = torch.Generator().manual_seed(10 * step + mesh.get_coordinate()[0])
                x = torch.randn(*SIZES, generator=generator).to(world.device)
                if sequence:
                    from hp_dtensor import Replicate, distribute_tensor

                    x = distribute_tensor(x, mesh["tp"], [Replicate()]).redistribute(placements=[Shard(1)])
                y = model(x.detach().requires_grad_())
                loss = (y * y).mean()
                loss.backward()
                grads = [getattr(p.grad, "_local", p.grad) for p in model.parameters()]
                found.extend(g.float().cpu().numpy() for g in grads)
        assert bool(doors.call_count) == (least == 0)
        return found, counted.counts

    (expected, expected_counts), (found, counts) = steps(2**60), steps(0)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert counts == expected_counts
