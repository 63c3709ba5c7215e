"""Products beside communication inside of torch.autocast."""

from __future__ import annotations

import pytest
import torch

from hp_dtensor import conversions
from hp_platform.testing import World, distributed
from hp_tp.overlap import OverlapPolicy, all_gather_matmul, matmul_reduce_scatter

POLICIES = {
    "whole": OverlapPolicy(),
    "cut": OverlapPolicy(min_nbytes=0, features_per_peer=0, chunk_nbytes=0),
    "sends": OverlapPolicy(min_nbytes=0, gather_by="sends"),
}


@pytest.mark.parametrize("policy", POLICIES)
@distributed(world_size=2, backends=("torch", "cuda"))
def test_products_are_cast_as_the_framework_casts_its_own(world: World, policy: str) -> None:
    """Small integers, exact in bfloat16, so that the order of sums does not matter."""
    cut = conversions.Cut(world.group, (0, 1), world.rank, 0, (3, 3))
    generator = torch.Generator().manual_seed(world.rank)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float().to(world.device).requires_grad_()

    x, first, bias, last = leaf(3, 4), leaf(5, 4), leaf(5), leaf(2, 5)
    leaves = (x, first, bias, last)

    def plain() -> torch.Tensor:
        y = torch.nn.functional.linear(conversions.gather_varying(x, cut), first, bias)
        return conversions.reduce_scatter(torch.nn.functional.linear(y, last), cut)

    def beside() -> torch.Tensor:
        (y,), _ = all_gather_matmul(x, [first], cut, biases=[bias], policy=POLICIES[policy])
        return matmul_reduce_scatter(y, last, cut, policy=POLICIES[policy])

    found = []
    for program in (plain, beside):
        with torch.autocast(world.device_type, torch.bfloat16):
            y = program()
        found.append((y, *torch.autograd.grad(y.float().sum(), leaves)))
    for expected, got in zip(*found, strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
