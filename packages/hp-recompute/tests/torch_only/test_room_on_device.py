"""Copies that take their time do not take memory, by the allocator of a device that has one."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from hp_platform.testing import World, distributed
from hp_recompute import SwapManager, swap_wrapper
from hp_recompute.swapping.copies import copies_on_streams
from hp_recompute.swapping.manager import use_manager

ROWS, WIDTH, NUM_LAYERS, NUM_SWAPPED = 512, 256, 8, 2


class Block(nn.Module):
    """Saves 5 MiB: memories of half a MiB and of two."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x.sin())))


# In a process of its own: memory that other tests have left in the allocator's cache is given out in larger pieces.
@distributed(world_size=1, backends=("cuda", "npu"), timeout=120, isolated=True)
def test_from_the_second_step_on_a_chain_takes_no_more_memory_than_in_the_first(world: World) -> None:
    torch.manual_seed(0)
    handle = world.platform.device(world.device)
    with torch.device(world.device):
        blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
    leaves = [x, *blocks.parameters()]

    def peak_of_a_step(sets_to_none: bool) -> int:
        for leaf in leaves:
            if leaf.grad is not None:
                leaf.grad = None if sets_to_none else leaf.grad.zero_()
        handle.synchronize()
        handle.reset_peak_memory()
        before = handle.memory_allocated()
        y = x
        for block in blocks:
            y = block(y)
        y.sum().backward()
        handle.synchronize()
        return handle.max_memory_allocated() - before

    for sets_to_none in (True, False):
        plain = [peak_of_a_step(sets_to_none) for _ in range(2)][-1]
        expected = [leaf.grad.clone() for leaf in leaves]
        layers = [_Called(block) for block in blocks]
        for layer in layers[:NUM_SWAPPED]:
            swap_wrapper(layer)
        with use_manager(SwapManager(copies=copies_on_streams)) as manager:
            for first, second in pairwise(layers):
                manager.set_forward_prefetch_layer(first, second)
            blocks, own = nn.ModuleList(layers), blocks
            peaks = [peak_of_a_step(sets_to_none) for _ in range(4)]
            blocks = own
            assert manager.host_nbytes >= NUM_SWAPPED * 4 * 2**20
        for one, other in zip(leaves, expected, strict=True):
            assert torch.equal(one.grad, other)
        # Between two memories that are saved, others are made: one of the largest may be there in addition.
        assert max(peaks[1:]) <= peaks[0] + 2 * 2**20, (peaks, plain)
        assert max(peaks) <= plain - 0.8 * NUM_SWAPPED * 5 * 2**20, (peaks, plain)


class _Called(nn.Module):
    """A block that swaps only under this name."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.block(x)
        return out
