"""What ``linear_cross_entropy`` holds, and in which dtype it adds up. torch only: its dispatch shows every tensor that is made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed
from hp_tp import linear_cross_entropy, vocab_parallel_cross_entropy
from hp_tp.loss import rows

sys.path.insert(0, str(Path(__file__).parent.parent))
from loss_oracle import check_near, numbers, targets

TORCH = ("torch", "cuda")
TOKENS, FEATURES, CLASSES = 24, 4, 60


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation makes, and in 32 bits or more."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0
        self.wide = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and not x._is_view():
                self.made = max(self.made, x.numel())
                if x.element_size() >= 4:
                    self.wide = max(self.wide, x.numel())
        return result


def _operands(world: World, num_classes: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x = torch.tensor(numbers(TOKENS, FEATURES, seed=7), dtype=dtype, device=world.device)
    weight = torch.tensor(numbers(num_classes, FEATURES, seed=8), dtype=dtype, device=world.device)
    return x.requires_grad_(), weight.requires_grad_()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@distributed((1, 2), backends=TORCH)
def test_no_tensor_of_tokens_times_classes_is_ever_made(reduction: str, world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    own = CLASSES // world.size
    for chunk, dtype in ((5, torch.float64), (5, torch.bfloat16), (None, torch.float32)):
        x, weight = _operands(world, own, dtype)
        target = torch.tensor(targets(CLASSES, TOKENS), device=world.device)
        with Largest() as largest:
            loss = linear_cross_entropy(
                x,
                weight,
                target,
                num_classes=CLASSES,
                mesh=mesh,
                label_smoothing=0.1,
                reduction=reduction,
                chunk_size=chunk,
            )
            loss.sum().backward()
        # A chunk of scores, the input or the weight, whichever is largest; the default is a quarter of the classes. Kernels gather
        # 4 numbers of each token from every rank.
        limit = max(
            TOKENS * (chunk or -(-own // 4)), TOKENS * FEATURES, own * FEATURES, TOKENS * 4 * world.size
        )
        assert largest.made <= limit < TOKENS * own, f"{largest.made} elements, chunks of {chunk}"
        with Largest() as plain:
            torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight), target % own).backward()
        assert plain.made >= TOKENS * own, "the hook does not see what the plain loss makes"


@distributed(2, backends=TORCH)
def test_the_largest_chunk_is_bounded_for_many_tokens(world: World) -> None:
    mesh, block = init_device_mesh(world.device_type, (world.size,)), rows.BLOCK
    try:
        rows.BLOCK = TOKENS * 3
        x, weight = _operands(world, CLASSES // 2, torch.float64)
        target = torch.tensor(targets(CLASSES, TOKENS), device=world.device)
        with Largest() as largest:
            linear_cross_entropy(x, weight, target, num_classes=CLASSES, mesh=mesh).backward()
        assert largest.made <= max(TOKENS * 3, CLASSES // 2 * FEATURES)
    finally:
        rows.BLOCK = block


@distributed(2, backends=TORCH)
def test_sixteen_bit_logits_are_never_held_in_float32_as_a_whole(world: World) -> None:
    mesh, block = init_device_mesh(world.device_type, (world.size,)), rows.BLOCK
    try:
        rows.BLOCK = TOKENS * CLASSES // 8
        logits = torch.tensor(numbers(TOKENS, CLASSES // 2), dtype=torch.bfloat16, device=world.device)
        logits = logits.requires_grad_()
        target = torch.tensor(targets(CLASSES, TOKENS), device=world.device)
        with Largest() as largest:
            vocab_parallel_cross_entropy(logits, target, num_classes=CLASSES, mesh=mesh).backward()
        assert largest.wide <= rows.BLOCK < logits.numel()
        assert logits.grad is not None
        assert logits.grad.dtype == torch.bfloat16
    finally:
        rows.BLOCK = block


def _exact(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> list[np.ndarray]:
    """Loss and gradients of these very numbers in float64."""
    leaves = [y.detach().double().requires_grad_() for y in (x, weight)]
    loss = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*leaves), target)
    return [y.cpu().numpy() for y in (loss.detach(), *torch.autograd.grad(loss, leaves))]


@distributed((1, 2), backends=TORCH)
def test_sixteen_bit_gradients_are_summed_in_float32_and_rounded_once(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    whole_x = torch.tensor(numbers(512, 8, seed=7) / 3, dtype=torch.bfloat16, device=world.device)
    whole_weight = torch.tensor(numbers(40, 8, seed=8) / 3, dtype=torch.bfloat16, device=world.device)
    target = torch.tensor(targets(40, 512), device=world.device)
    exact = _exact(whole_x, whole_weight, target)
    own = whole_weight.chunk(world.size)[world.rank]
    for autocast in (False, True):
        dtype = torch.float32 if autocast else torch.bfloat16
        x, weight = (y.clone().to(dtype).requires_grad_() for y in (whole_x, own))
        with torch.autocast(world.device_type, torch.bfloat16, enabled=autocast):
            loss = linear_cross_entropy(x, weight, target, num_classes=40, mesh=mesh, chunk_size=3)
        loss.backward()
        assert loss.dtype == torch.float32
        # Scores and sums are float32's: 512 tokens, values near 4.
        check_near(loss, exact[0], name="loss", atol=1e-5)
        assert x.grad is not None
        assert weight.grad is not None
        own_exact = np.array_split(exact[2], world.size)[world.rank]
        for name, grad, right in (("input", x.grad, exact[1]), ("weight", weight.grad, own_exact)):
            # bfloat16 has 8 bits: what flows back into scores is rounded by up to 2^-9 of each, as in the plain program, and
            # the sum once more (that of the ranks' gradients of the input as well). Summed in bfloat16, 512 terms were off by 1.
            limit = np.abs(right).max() * 2.0**-7
            check_near(grad.float(), right, name=f"{name}, autocast {autocast}", atol=limit)
