"""On a rank: the layers under each of the ways of `recompute`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from bench.cases.recompute_settings import PARTS, Side
from bench.models.llama import Block, rotary
from bench.models.sizes import Sizes

Layer = Callable[..., torch.Tensor]
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]


class Layers:
    """Blocks of a decoder with an input and the gradient of their output; all sides use the same."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        with torch.device(device):
            self.blocks = [Block(sizes).to(dtype) for _ in range(sizes.layers)]
            self.x = torch.randn(1, sizes.length, sizes.dim, dtype=dtype, requires_grad=True)
            self.gradient = torch.randn(1, sizes.length, sizes.dim, dtype=dtype) / sizes.length
        width = sizes.dim // sizes.heads
        self.angles = rotary(sizes.length, width, torch.device(device), dtype)

    @property
    def leaves(self) -> list[torch.Tensor]:
        """What gets a gradient."""
        return [self.x, *(parameter for block in self.blocks for parameter in block.parameters())]

    def forward(self, layers: Sequence[Layer]) -> torch.Tensor:
        """The output of the layers."""
        x = self.x
        for layer in layers:
            x = layer(x, *self.angles)
        return x

    def step(self, layers: Sequence[Layer], *, keeps_gradients: bool = False) -> torch.Tensor:
        """Forward and backward; the gradients stay on the leaves. ``keeps_gradients``: and are added to those of the step before."""
        for leaf in self.leaves:
            leaf.grad = leaf.grad if keeps_gradients else None
        y = self.forward(layers)
        y.backward(self.gradient)
        return y.detach()

    def under(self, side: Side, num_fitting: int) -> list[Layer]:
        """The blocks as a side calls them; the first ``num_fitting`` of them swap in FITTING."""
        if side in PARTS:
            from bench.cases.recompute_budget import budgeted

            return budgeted(self, side)[0]
        if side is Side.FITTING:
            return _in_a_chain(self.blocks, num_fitting)
        return [_wrapped(block, _way(side, index)) for index, block in enumerate(self.blocks)]


def _way(side: Side, index: int) -> Side:
    """Of one layer: of a mixed side one that is not mixed."""
    if side is Side.MIXED:
        return Side.FULL if index % 2 else Side.SWAP
    if side is Side.TORCH_MIXED:
        return Side.TORCH_FULL if index % 2 else Side.TORCH_SWAP
    return side


def _wrapped(block: Block, side: Side) -> Layer:
    def call(*args: torch.Tensor) -> torch.Tensor:
        return block(*args)

    if side is Side.PLAIN:
        return call
    if side is Side.TORCH_FULL:
        return partial(checkpoint, call, use_reentrant=False)
    if side is Side.TORCH_SELECTIVE:
        contexts = partial(create_selective_checkpoint_contexts, PRODUCTS)
        return partial(checkpoint, call, use_reentrant=False, context_fn=contexts)
    if side is Side.TORCH_SWAP:
        return partial(_saved_on_cpu, call)
    import hp_recompute

    made: dict[Side, Callable[[], Any]] = {
        Side.FULL: lambda: hp_recompute.checkpoint_wrapper(call),
        Side.SELECTIVE: lambda: hp_recompute.checkpoint_wrapper(call, [torch.matmul]),
        Side.SWAP: lambda: hp_recompute.swap_wrapper(call),
    }
    layer: Layer = made[side]()
    return layer


class Called(torch.nn.Module):
    """A block under options of its own, which the block itself does not keep."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        """The block's."""
        out: torch.Tensor = self.block(*args)
        return out


def _in_a_chain(blocks: Sequence[Block], number: int) -> list[Layer]:
    """The first ones swap; the others keep all, and are in the chain so that copies may take until they need the memory."""
    import hp_recompute

    layers = [Called(block) for block in blocks]
    for layer in layers[:number]:
        hp_recompute.swap_wrapper(layer)
    manager = hp_recompute.SwapManager()
    for first, second in pairwise(layers):
        manager.set_forward_prefetch_layer(first, second)
    return list(layers)


def _saved_on_cpu(call: Layer, *args: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return call(*args)
