"""Weight gradients in the dtype of the reduction: more exact than converted ones, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_platform import init_device_mesh
from hp_platform.testing import World, count_collectives, distributed


class Net(torch.nn.Module):
    def __init__(self, device: str, uses_weight: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(6, 8, device=device)
        self.second = torch.nn.Linear(8, 4, bias=False, device=device)
        self.scale = torch.nn.Parameter(torch.ones(4, device=device))
        self.uses_weight = uses_weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.nn.functional.silu(self.first(x))) * self.scale
        return x + self.second.weight.sum() * 0.5 if self.uses_weight else x


def policy(wide: bool) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, weight_grads_in_reduce_dtype=wide
    )


def inputs(world: World, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7 + rank)
    return torch.randn(5, 3, 6, generator=generator).to(world.device)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def trained(world: World, wide: bool, steps: int = 1, **options: Any) -> dict[str, torch.Tensor]:
    model = Net(world.device, **options)
    fully_shard(model, init_device_mesh(world.device_type, (world.size,)), mp_policy=policy(wide))
    for step in range(steps):
        model.set_requires_gradient_sync(step == steps - 1)
        model(inputs(world, world.rank)).float().square().mean().backward()
    return gradients(model)


def exact(world: World) -> dict[str, torch.Tensor]:
    """One process: the same roundings of weights, inputs and what flows back, weight gradients in float32."""
    model = Net(world.device).to(torch.bfloat16)
    found: dict[str, torch.Tensor] = {}

    def watch(name: str, layer: torch.nn.Linear) -> None:
        def after(module: Any, args: tuple, output: torch.Tensor) -> None:
            rows = args[0].detach().flatten(0, -2).float()

            def add(gradient: torch.Tensor) -> None:
                product = gradient.flatten(0, -2).float().t() @ rows / world.size
                found[name] = found[name] + product if name in found else product

            output.register_hook(add)

        layer.register_forward_hook(after)

    watch("first.weight", model.first)
    watch("second.weight", model.second)
    for rank in range(world.size):
        model(inputs(world, rank).to(torch.bfloat16)).float().square().mean().backward()
    return found


@distributed(world_size=(1, 2, 3), backends=("torch", "cuda"))
def test_weight_gradients_are_not_rounded_to_the_dtype_of_the_computation(world: World) -> None:
    wide, narrow, expected = trained(world, True), trained(world, False), exact(world)
    for name, value in expected.items():
        torch.testing.assert_close(wide[name], value, rtol=1e-5, atol=1e-6)
        assert not torch.equal(wide[name], narrow[name])
    for name in ("first.bias", "scale"):
        torch.testing.assert_close(wide[name], narrow[name], rtol=0.02, atol=1e-3)


@distributed(world_size=2, backends=("torch", "cuda"))
def test_other_uses_of_a_weight_and_several_backwards_add_up(world: World) -> None:
    for options in ({"uses_weight": True}, {"steps": 3}, {"steps": 2, "uses_weight": True}):
        wide, narrow = trained(world, True, **options), trained(world, False, **options)
        for name, value in narrow.items():
            torch.testing.assert_close(wide[name], value, rtol=0.02, atol=2e-3)


@distributed(world_size=2, backends=("torch", "cuda"))
def test_there_are_as_many_collectives_and_reductions_send_wide_numbers(world: World) -> None:
    found = []
    for wide in (False, True):
        model = Net(world.device)
        fully_shard(model, init_device_mesh(world.device_type, (2,)), mp_policy=policy(wide))
        with count_collectives() as counted:
            x = inputs(world, world.rank).requires_grad_()
            checkpoint(model, x, use_reentrant=False).float().square().mean().backward()
        found.append((gradients(model), counted))
    (narrow, counted), (wide_ones, wide_counted) = found
    counted.assert_counts(all_gather=1, all_to_all=1)
    wide_counted.assert_counts(all_gather=1, reduce_scatter=1)
    assert counted.nbytes("all_gather") == wide_counted.nbytes("all_gather")
    assert 2 * counted.nbytes("all_to_all") == wide_counted.nbytes("reduce_scatter")
    for name, value in narrow.items():
        torch.testing.assert_close(wide_ones[name], value, rtol=0.02, atol=2e-3)


@distributed(world_size=1, backends=("torch", "cuda"))
def test_a_second_derivative_is_refused(world: World) -> None:
    model = Net(world.device)
    fully_shard(model, init_device_mesh(world.device_type, (1,)), mp_policy=policy(True))
    model.set_reshard_after_backward(False)
    x = inputs(world, 0).requires_grad_()
    loss = model(x).float().square().mean()
    with pytest.raises(RuntimeError, match="weight_grads_in_reduce_dtype gives first derivatives only"):
        torch.autograd.grad(loss, [x], create_graph=True)
