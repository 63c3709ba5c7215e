"""Swap of layers in tensor parallel styles: the bits, and the collectives, of those that are not swapped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_dtensor import Replicate, Shard, parallelize_module
from hp_platform import init_device_mesh
from hp_platform.testing import World, count_collectives, distributed
from hp_recompute import checkpoint_wrapper, swap_wrapper
from hp_recompute.swapping.late_copies import late_copies
from hp_tp import ColwiseParallel, ModuleCuts, RowwiseParallel

sys.path.insert(0, str(Path(__file__).parent))
from recompute_parts import assert_equal, stack_of_two_layers, whole, widest

WRAPS: dict[str, Callable[[Any], Any]] = {
    "swap": swap_wrapper,
    "packed": lambda block: swap_wrapper(block, group_swap=True),
    "inputs of checkpoints": lambda block: checkpoint_wrapper(block, swap_inputs=True),
}


@pytest.mark.parametrize("sequence", [False, True], ids=["whole sequence", "cut sequence"])
@distributed(world_size=2)
def test_layers_in_styles_that_are_swapped_give_the_bits_of_those_that_are_not(
    world: World, sequence: bool
) -> None:
    platform, mesh = world.platform, init_device_mesh(world.device_type, (world.size,))
    lies = Shard(0) if sequence else Replicate()

    def step(wrap: Callable[[Any], Any] | None, order: tuple[int, ...]) -> list[Any]:
        model = stack_of_two_layers(
            world, lambda block, x: platform.sin(x + block.down(platform.silu(block.up(x)))), num_blocks=3
        )
        plan = {
            "blocks.*.up": ColwiseParallel(input_layouts=lies, cuts=ModuleCuts({"weight": 0})),
            "blocks.*.down": RowwiseParallel(output_layouts=lies, cuts=ModuleCuts({"weight": 1})),
        }
        parallelize_module(model, mesh, plan)
        for block in model.blocks if wrap is not None else ():
            wrap(block)
        random = np.random.default_rng(world.rank if sequence else 0)
        xs = [platform.tensor(random.uniform(-1, 1, (3, 4)), widest(world), world.device) for _ in order]
        xs = [platform.set_requires_grad_(x, True) for x in xs]
        losses = [platform.sum(y * y) for y in [model(x) for x in xs]]
        for index in order:
            platform.backward([losses[index]])
        found = [platform.get_grad(x) for x in xs]
        found.extend(p.grad for _, p in platform.named_parameters(model))
        return [platform.to_numpy(whole(x)) for x in found]

    for order in ((0,), (1, 0, 2)):
        with count_collectives() as expected_count:
            expected = step(None, order)
        for name, wrap in WRAPS.items():
            with late_copies() as manager:
                with count_collectives() as counted:
                    assert_equal(step(wrap, order), expected)
                assert manager.host_nbytes > 0
            if name != "inputs of checkpoints":
                assert counted.counts == expected_count.counts
