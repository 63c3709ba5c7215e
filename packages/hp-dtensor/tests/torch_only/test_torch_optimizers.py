"""torch's own optimizers, clipping and gradient scaling on DTensors: every step as in one process."""

import re
from typing import Any

import pytest
import torch

from hp_dtensor import Partial, Placement, Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, distributed

TORCH = ("torch", "cuda")
# Three steps of some dozen roundings of numbers below 10 in float64.
TOLERANCE = 1e-12
SHAPES: list[tuple[int, ...]] = [(5, 3), (1,), (4, 2)]
PLACEMENTS: list[Placement] = [Shard(0), Shard(0), Replicate()]

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"maximize": True}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "nadam": (torch.optim.NAdam, {}),
    "adamax": (torch.optim.Adamax, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "asgd": (torch.optim.ASGD, {}),
    "radam": (torch.optim.RAdam, {}),
}
MODES: dict[str, dict[str, bool]] = {
    "one by one": {"foreach": False},
    "lists": {"foreach": True},
    "fused": {"fused": True},
}
HAVE_FUSED = ("sgd", "adam", "adamw", "adagrad")


def _parameters(world: World, *, sharded: bool) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.rand(s, generator=generator, dtype=torch.float64).to(world.device) for s in SHAPES]
    if sharded:
        mesh = init_device_mesh(world.device_type, (world.size,))
        values = [distribute_tensor(x, mesh, [p]) for x, p in zip(values, PLACEMENTS, strict=True)]
    return [torch.nn.Parameter(x) for x in values]


def _train(parameters: list[Any], optimizer: torch.optim.Optimizer, **clip: Any) -> list[Any]:
    norms = []
    for step in range(3):
        loss = sum(((x * x * (i + step)).sum() for i, x in enumerate(parameters)), parameters[0].sum())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 2.0, **clip))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(2, backends=TORCH)
def test_optimizer_steps_as_in_one_process(name: str, world: World) -> None:
    make, options = OPTIMIZERS[name]
    for mode, how in MODES.items():
        if mode == "fused" and name not in HAVE_FUSED:
            continue
        plain, cut = (_parameters(world, sharded=sharded) for sharded in (False, True))
        optimizers = [make(xs, lr=0.05, **options, **how) for xs in (plain, cut)]  # type: ignore[call-arg]
        lists = {"foreach": mode != "one by one"}
        try:
            expected = _train(plain, optimizers[0], **lists)
        except RuntimeError as error:
            # Not every torch has every fused optimizer on every device: then nor does it for DTensors.
            assert mode == "fused", error
            with pytest.raises(RuntimeError, match=re.escape(str(error))):
                _train(cut, optimizers[1], **lists)
            continue
        found = _train(cut, optimizers[1], **lists)
        for x, y in zip([*found, *cut], [*expected, *plain], strict=True):
            assert_parity(x, y, rtol=TOLERANCE, atol=TOLERANCE, name=f"{name} {mode}")
        for parameter in cut:
            for key, state in optimizers[1].state[parameter].items():
                if key != "step" and isinstance(state, torch.Tensor) and state.ndim:
                    assert state.placements == parameter.placements, key


@pytest.mark.parametrize("fused", [False, True])
@distributed(2, backends="torch")
def test_gradient_scaler_skips_a_step_on_all_ranks_when_one_overflows(fused: bool, world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    optimizer = torch.optim.Adam([weight], lr=0.5, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for last, moved in ((float("inf"), False), (2.0, True)):
        factor = distribute_tensor(torch.tensor([1.0, 1.0, 1.0, last]), mesh, [Shard(0)])
        before = weight.detach().clone()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert (weight.detach() - before).abs().sum().item() == pytest.approx(2.0 if moved else 0.0, abs=1e-6)
    assert scaler.get_scale() == 2.0


@distributed(2, backends=TORCH)
def test_out_is_written_where_it_lies(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    x, y = (
        torch.tensor(v, dtype=torch.float64, device=world.device) for v in ([1.0, 5.0, 3.0], [4.0, 2.0, 3.5])
    )
    for first in (Shard(0), Replicate(), Partial()):
        for target in (Shard(0), Replicate(), Partial()):
            a, b = distribute_tensor(x, mesh, [first]), distribute_tensor(y, mesh, [Replicate()])
            out = distribute_tensor(torch.zeros_like(x), mesh, [target])
            assert torch.maximum(a, b, out=out) is out
            assert out.placements == (target,)
            assert_parity(out, torch.maximum(x, y), atol=TOLERANCE, name=f"{first} {target}")
    short = distribute_tensor(torch.zeros(2, dtype=torch.float64, device=world.device), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="a DTensor of the result's shape"):
        torch.maximum(a, b, out=short)
    with pytest.raises(ValueError, match="records no gradient"):
        torch.add(a.detach().redistribute(placements=[Shard(0)]).requires_grad_(), b, out=out)
