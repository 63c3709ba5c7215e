"""Modules of torch with DTensor parameters: moved, cast, emptied, loaded, copied, parametrised; and tensors on meta."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from hp_dtensor import (
    DTensor,
    Partial,
    Placement,
    ShardingPlan,
    distribute_tensor,
    init_parameters,
    shard_module,
)
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from placed_tensors import S0, S1, TOLERANCE, TORCH, P, R, make_mesh, whole_of

PLAN = {"0.weight": [S0], "0.bias": [S0], "2.weight": [S1], "2.bias": [R]}


def _plain(world: World) -> Any:
    # 5 rows over 3 ranks are uneven, and the last layer has fewer rows than ranks.
    module = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 2)).double().to(world.device)
    for i, p in enumerate(module.parameters()):
        p.data.copy_(whole_of(world, *p.shape) + i)
    return module


def _sharded(world: World) -> Any:
    return shard_module(_plain(world), make_mesh(world), ShardingPlan(PLAN))


def _check(world: World, module: Any, plain: Any, tolerance: float = TOLERANCE) -> None:
    """Values and gradients."""
    dtype = plain[0].weight.dtype
    module.zero_grad()
    plain.zero_grad()
    y = module(distribute_tensor(whole_of(world, 3, 4).to(dtype), make_mesh(world), [R]))
    expected = plain(whole_of(world, 3, 4).to(dtype))
    assert_parity(y, expected, rtol=tolerance, atol=tolerance)
    y.square().mean().backward()
    expected.square().mean().backward()
    parameters = dict(module.named_parameters())
    for name, p in plain.named_parameters():
        assert isinstance(parameters[name], DTensor) and isinstance(parameters[name], nn.Parameter)
        assert_parity(parameters[name].grad, p.grad, rtol=tolerance, atol=tolerance, name=name)


@distributed((2, 3), backends=TORCH)
def test_a_module_is_cast_to_every_dtype_and_back(world: World) -> None:
    for cast in (
        lambda m: m.to(torch.float32),
        lambda m: m.float(),
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.double(),
        lambda m: m.to(world.device, torch.float32),
        lambda m: m.type(torch.float32),
        lambda m: m.type(m[0].weight.type()),
        lambda m: m.half().double(),
    ):
        module, plain = _sharded(world), _plain(world)
        weight, placements = module[0].weight, [p.placements for p in module.parameters()]
        cast(module)
        cast(plain)
        assert module[0].weight is weight and [p.placements for p in module.parameters()] == placements
        for mine, p in zip(module.parameters(), plain.parameters(), strict=True):
            assert mine.dtype == mine.to_local().dtype == p.dtype and mine.requires_grad and mine.is_leaf
            assert_parity(mine, p, exact=True)
        if plain[0].weight.dtype == torch.float64:
            _check(world, module, plain)


@pytest.mark.parametrize("swap", [False, True])
@distributed((2, 3), backends=TORCH)
def test_a_module_is_emptied_and_loaded(world: World, swap: bool) -> None:
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        for on_meta in (False, True):
            module, plain = _sharded(world), _plain(world)
            state = copy.deepcopy(module.state_dict())
            if on_meta:
                module.to("meta")
                assert all(p.to_local().is_meta for p in module.parameters())
            with count_collectives() as counted:
                module.to_empty(device=world.device)
            counted.assert_counts()
            for p, (name, wanted) in zip(module.parameters(), state.items(), strict=True):
                assert isinstance(p, nn.Parameter) and isinstance(p, DTensor) and p.requires_grad, name
                assert p.placements == wanted.placements and p.shape == wanted.shape, name
                assert p.to_local().shape == wanted.to_local().shape, name
                assert p.device.type == world.device_type, name
            module.load_state_dict(state)
            _check(world, module, plain)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@distributed((2, 3), backends=TORCH)
def test_loading_may_assign_the_tensors_of_the_state(world: World) -> None:
    for on_meta in (False, True):
        module, plain = _sharded(world), _plain(world)
        state = {name: x.clone() for name, x in module.state_dict().items()}
        with torch.no_grad():
            for p in module.parameters():
                p.zero_()
        module[2].bias.requires_grad_(False)
        if on_meta:
            module.to("meta")
        module.load_state_dict(state, assign=True)
        assert module[0].weight.to_local().data_ptr() == state["0.weight"].to_local().data_ptr()
        assert not module[2].bias.requires_grad and module[0].weight.requires_grad
        module[2].bias.requires_grad_()
        _check(world, module, plain)


@distributed((2, 3), backends=TORCH)
def test_a_copy_of_a_module_trains_by_itself(world: World) -> None:
    module, plain = _sharded(world), _plain(world)
    module[2].bias = nn.Parameter(module[2].bias.detach(), requires_grad=False)
    module.register_parameter("again", module[0].weight)
    _whole_before = module[0].weight.full_tensor().detach().clone()
    module(distribute_tensor(whole_of(world, 3, 4), make_mesh(world), [R])).sum().backward()
    other = copy.deepcopy(module)
    assert other.again is other[0].weight and other.again is not module.again
    assert not other[2].bias.requires_grad
    assert_parity(other.again.grad, module.again.grad.full_tensor(), exact=True)
    del other.again
    other[2].bias.requires_grad_()
    with torch.no_grad():
        module[0].weight.zero_()
    assert_parity(other[0].weight, _whole_before, exact=True)
    _check(world, other, plain)


class Scaled(nn.Module):
    """A parametrisation with a tensor of its own."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(scale)

    def forward(self, x: Any) -> Any:
        return x * self.scale.exp()

    def right_inverse(self, x: Any) -> Any:
        return x / self.scale.exp()


@pytest.mark.parametrize("at", [S0, S1, R], ids=str)
@distributed((2, 3), backends=TORCH)
def test_weights_are_parametrised(at: Placement, world: World) -> None:
    mesh = make_mesh(world)

    def scale(module: Any, is_sharded: bool) -> None:
        value = whole_of(world, 5, 1)
        placed = distribute_tensor(value, mesh, [S0 if at == S0 else R]) if is_sharded else value
        nn.utils.parametrize.register_parametrization(module, "weight", Scaled(placed))

    for wrap in (
        scale,
        lambda m, _: parametrizations.weight_norm(m),
        lambda m, _: parametrizations.weight_norm(m, dim=1),
    ):
        made = []
        for is_sharded in (False, True):
            module = nn.Linear(4, 5, bias=False, dtype=torch.float64, device=world.device)
            weight, x = whole_of(world, 5, 4), whole_of(world, 3, 4)
            if is_sharded:
                weight, x = distribute_tensor(weight, mesh, [at]), distribute_tensor(x, mesh, [R])
            module.weight = nn.Parameter(weight)
            wrap(module, is_sharded)
            y = module(x)
            y.square().sum().backward()
            grads = {name: p.grad for name, p in module.named_parameters()}
            nn.utils.parametrize.remove_parametrizations(module, "weight")
            made.append((y, grads, module.weight))
        (expected, plain_grads, plain_weight), (y, grads, weight) = made
        assert isinstance(weight, DTensor) and isinstance(weight, nn.Parameter)
        # The kernel of weight_norm on cuda is 1.4e-7 away from its formula, in float64, too (H200, torch 2.11).
        bound = 2e-6 if wrap is not scale and world.device_type == "cuda" else TOLERANCE
        assert_parity(y, expected, rtol=bound, atol=bound)
        assert_parity(weight, plain_weight, rtol=bound, atol=bound)
        assert set(grads) == set(plain_grads)
        for name, g in plain_grads.items():
            assert_parity(grads[name], g, rtol=bound, atol=bound, name=name)


@distributed(2, backends=TORCH)
def test_the_spectral_norm_is_that_of_the_whole_matrix(world: World) -> None:
    weight, x = whole_of(world, 5, 4), whole_of(world, 3, 4)
    for at in (S0, S1, R):
        module = nn.Linear(4, 5, bias=False, dtype=torch.float64, device=world.device)
        module.weight = nn.Parameter(distribute_tensor(weight, make_mesh(world), [at]))
        parametrizations.spectral_norm(module)
        for _ in range(20):  # each call in training is one more step of the power method
            y = module(distribute_tensor(x, make_mesh(world), [R]))
        # The power method converges by the square of the ratio of the two largest singular values in each step.
        assert_parity(y, x @ (weight / torch.linalg.svdvals(weight)[0]).T, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------------ meta
@distributed((2, 3), backends=TORCH)
def test_tensors_on_meta_are_placed_without_memory_or_communication(world: World) -> None:
    mesh = make_mesh(world)
    for shape in ((5, 3), (1, 2), (0, 3)):
        for at in (S0, S1, R, P, Partial("avg")):
            for source in (None, 0):
                real = distribute_tensor(torch.zeros(shape, device=world.device), mesh, [at])
                whole = torch.empty(
                    shape, device="meta", dtype=torch.bfloat16, requires_grad=not at.is_partial()
                )
                with count_collectives() as counted:
                    x = distribute_tensor(whole, mesh, [at], src_data_rank=source)
                counted.assert_counts()
                assert x.device.type == x.to_local().device.type == "meta" and x.dtype == torch.bfloat16
                assert x._spec is real._spec and x.to_local().shape == real.to_local().shape
                assert x.requires_grad == whole.requires_grad and x.is_leaf
    x, w = (distribute_tensor(torch.empty(5, 4, device="meta"), mesh, [at]) for at in (S0, R))
    y = F.linear(x, w)  # planned and run without data
    assert y.device.type == "meta" and y.shape == (5, 5) and y.placements == (S0,)
    with pytest.raises(ValueError, match="has no data to communicate: put it on a device first"):
        x.redistribute(placements=[R])


@distributed((2, 3), backends=TORCH)
def test_a_module_on_meta_is_sharded_and_then_made_real(world: World) -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 2)).double()
    shard_module(module, make_mesh(world), ShardingPlan(PLAN))
    assert all(isinstance(p, DTensor) and p.to_local().is_meta for p in module.parameters())
    module.to_empty(device=world.device)
    module.load_state_dict(_plain(world).state_dict())  # a whole checkpoint: each rank takes its piece
    _check(world, module, _plain(world))
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 2)).double()
    init_parameters(shard_module(other, make_mesh(world), ShardingPlan(PLAN)))
    assert not any(p.to_local().is_meta for p in other.parameters())
