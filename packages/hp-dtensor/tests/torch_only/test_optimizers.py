"""torch's optimizers, gradient clipping and GradScaler on DTensors: three steps give the unsharded parameters."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, distributed

TORCH = ("torch", "cuda")
PLACES = (Shard(0), Shard(0), Shard(1), Replicate())
# Three steps of rsqrt and divisions of numbers near 1, in float64.
TOLERANCE = 1e-12

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p, **k: optim.SGD(p, 0.1, **k),
    "momentum": lambda p, **k: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, **k),
    "nesterov": lambda p, **k: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, **k),
    "Adam": lambda p, **k: optim.Adam(p, 0.01, **k),
    "amsgrad": lambda p, **k: optim.Adam(p, 0.01, amsgrad=True, **k),
    "AdamW": lambda p, **k: optim.AdamW(p, 0.01, **k),
    "maximize": lambda p, **k: optim.AdamW(p, 0.01, maximize=True, **k),
    "RMSprop": lambda p, **k: optim.RMSprop(p, 0.01, **k),
    "Adagrad": lambda p, **k: optim.Adagrad(p, 0.01, **k),
    "NAdam": lambda p, **k: optim.NAdam(p, 0.01, **k),
}
CASES = [(name, {"foreach": foreach}) for name in OPTIMIZERS for foreach in (False, True)]
CASES = [
    *CASES,
    *((name, {"fused": True}) for name in ("AdamW", "SGD", "momentum", "Adagrad")),
    ("AdamW", {}),
]


def _model(world: World, sharded: bool, dtype: torch.dtype = torch.float64) -> tuple[list[Any], Any]:
    generator = torch.Generator().manual_seed(0)
    whole = [
        (torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3).to(world.device, dtype)
        for shape in ((7, 4), (7,), (4, 7), (4,), (5, 4))
    ]
    if not sharded:
        return [nn.Parameter(t) for t in whole[:4]], whole[4]
    mesh = init_device_mesh(world.device_type, (world.size,))
    cut = [distribute_tensor(t, mesh, [at]) for t, at in zip(whole, (*PLACES, Replicate()), strict=True)]
    return [nn.Parameter(t) for t in cut[:4]], cut[4]


def _loss(p: list[Any], x: Any) -> Any:
    return F.linear(F.gelu(F.linear(x, p[0], p[1])), p[2], p[3]).square().mean()


def _three_steps(p: list[Any], x: Any, optimizer: optim.Optimizer) -> None:
    for _ in range(3):
        _loss(p, x).backward()
        optimizer.step()
        optimizer.zero_grad()


def _compare(sharded: list[Any], plain: list[Any], tolerance: float = TOLERANCE) -> None:
    for mine, expected in zip(sharded, plain, strict=True):
        assert_parity(mine.detach(), expected.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@distributed(2, backends=TORCH)
def test_three_steps_give_the_unsharded_parameters(name: str, options: dict[str, Any], world: World) -> None:
    (plain, x), (cut, cut_x) = (_model(world, sharded) for sharded in (False, True))
    optimizer = OPTIMIZERS[name](cut, **options)
    try:
        _three_steps(plain, x, OPTIMIZERS[name](plain, **options))
    except RuntimeError as error:
        # Not every torch has every fused optimizer on every device: then nor does it for DTensors.
        assert "fused" in options, error
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            _three_steps(cut, cut_x, optimizer)
        return
    _three_steps(cut, cut_x, optimizer)
    _compare(cut, plain)
    for state in optimizer.state.values():
        assert all(
            isinstance(v, DTensor) or v.ndim == 0 for v in state.values() if isinstance(v, torch.Tensor)
        )


@pytest.mark.parametrize("fused", [False, True])
@distributed(2, backends=TORCH)
def test_a_scaler_skips_on_all_ranks_what_overflows_on_one(world: World, fused: bool) -> None:
    moved = []
    for sharded in (False, True):
        p, x = _model(world, sharded, torch.float32)
        optimizer = optim.AdamW(p, 0.01, fused=fused)
        scaler = torch.amp.GradScaler(world.device_type, init_scale=8.0)
        for _ in range(3):
            scaler.scale(_loss(p, x)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        moved.append(p)
    # float32, where AdamW divides by square roots of small numbers.
    _compare(moved[1], moved[0], 1e-5)
    scaler.scale(_loss(p, x)).backward()
    before = [t.to_local().clone() for t in p]
    if world.rank == 0:
        p[0].grad.to_local()[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(t.to_local(), b) for t, b in zip(p, before, strict=True))


@distributed(2, backends=TORCH)
def test_the_state_of_an_optimizer_loads_into_another(world: World) -> None:
    p, x = _model(world, True)
    optimizer = optim.AdamW(p, 0.01)
    _loss(p, x).backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    others, _ = _model(world, True)
    second = optim.AdamW(others, 0.01)
    second.load_state_dict(state)
    loaded = second.state[others[0]]["exp_avg"]
    assert isinstance(loaded, DTensor) and loaded.placements == (Shard(0),)
    assert torch.equal(loaded.to_local(), optimizer.state[p[0]]["exp_avg"].to_local())


@pytest.mark.parametrize("foreach", [False, True])
@distributed(2, backends=TORCH)
def test_one_optimizer_serves_dtensors_beside_plain_tensors_and_other_dtypes(
    world: World, foreach: bool
) -> None:
    p, x = _model(world, True)
    plain = nn.Parameter(torch.ones(3, device=world.device))
    half = nn.Parameter(p[0].detach().bfloat16())
    optimizer = optim.AdamW([*p, plain, half], 0.01, foreach=foreach)
    expected, y = _model(world, False)
    alone = optim.AdamW(expected, 0.01, foreach=foreach)
    (_loss(p, x) + 0).backward()
    (plain.sum() * 2).backward()
    (half * 2).sum().backward()
    _loss(expected, y).backward()
    optimizer.step()
    alone.step()
    _compare(p, expected)
    assert plain[0] != 1 and half.dtype == torch.bfloat16
