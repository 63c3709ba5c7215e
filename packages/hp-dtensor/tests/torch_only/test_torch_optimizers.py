"""torch's own optimizers, clipping and gradient scaling on DTensors: every step as in one process."""

import inspect
import itertools
import re
from typing import Any
from unittest import mock

import pytest
import torch

from hp_dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, distributed

TORCH = ("torch", "cuda")
WITH_NPU = (*TORCH, "npu")
"""Where torch allows capturable optimizers, without a graph: cuda, and npu."""
# Three steps of some dozen roundings of numbers below 10 in float64.
TOLERANCE = 1e-12
SHAPES: list[tuple[int, ...]] = [(5, 3), (1,), (4, 2), (2, 7)]
PLACEMENTS: list[Placement] = [Shard(0), Shard(0), Replicate(), Shard(1)]

OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {}],
    "Adam": [{"amsgrad": True}],
    "AdamW": [{}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "Adagrad": [{"weight_decay": 0.1}],
    "NAdam": [{}],
    "Adamax": [{}],
    "Adadelta": [{"rho": 0.8}],
    "ASGD": [{}],
    "RAdam": [{"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "Rprop": [{}],
    "Adafactor": [{"weight_decay": 0.1}],
    "LBFGS": [{"max_iter": 3, "history_size": 2}, {"max_iter": 3, "line_search_fn": "strong_wolfe"}],
    "Muon": [{"nesterov": True}, {"adjust_lr_fn": "match_rms_adamw"}],
    "SparseAdam": [{}],
}
"""Every optimizer of torch.optim, with options that change what it computes."""
LR = 0.05
MODES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one by one": {"foreach": False},
    "lists": {"foreach": True},
    "fused": {"fused": True},
    "maximize": {"maximize": True, "foreach": True},
    "capturable": {"capturable": True, "foreach": False},
    "capturable lists": {"capturable": True, "foreach": True},
    "lr is a tensor": {"lr": LR},
    "lr is a tensor, one by one": {"lr": LR, "foreach": False},
    "lr is a tensor, fused": {"lr": LR, "fused": True},
    "lr is a tensor, capturable lists": {"lr": LR, "capturable": True, "foreach": True},
}


def _real(world: World) -> torch.dtype:
    """The widest floating dtype that can be reduced: HCCL has no float64."""
    return torch.float64 if world.platform.supports("reduce_float64", world.device_type) else torch.float32


def _parameters(world: World, *, sharded: bool, name: str = "") -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    values = [
        torch.rand(s, generator=generator, dtype=torch.float64).to(world.device, _real(world)) for s in SHAPES
    ]
    places = PLACEMENTS
    if name == "Muon":  # for matrices only
        values, places = [values[i] for i in (0, 2, 3)], [places[i] for i in (0, 2, 3)]
    if sharded:
        mesh = init_device_mesh(world.device_type, (world.size,))
        values = [distribute_tensor(x, mesh, [p]) for x, p in zip(values, places, strict=True)]
    return [torch.nn.Parameter(x) for x in values]


def _train(parameters: list[Any], optimizer: torch.optim.Optimizer, **clip: Any) -> list[Any]:
    norms = []
    for step in range(3):

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            loss = sum(((x * x * (i + step)).sum() for i, x in enumerate(parameters)), parameters[0].sum())
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, 2.0, **clip))
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return norms


def _made(name: str, parameters: list[Any], options: dict[str, Any]) -> Any:
    lr = options.get("lr", LR)
    if "lr" in options:
        options = {**options, "lr": torch.tensor(lr, dtype=parameters[0].dtype)}
        if "capturable" in options or "fused" in options:
            options["lr"] = options["lr"].to(parameters[0].device)
    return getattr(torch.optim, name)(parameters, **{"lr": LR, **options})


@pytest.mark.once
def test_every_optimizer_of_torch_is_among_the_cases() -> None:
    known = {
        name for name, cls in vars(torch.optim).items() if isinstance(cls, type) and cls is not torch.optim.Optimizer
    }  # fmt: skip
    assert {name for name in known if issubclass(getattr(torch.optim, name), torch.optim.Optimizer)} <= set(
        OPTIMIZERS
    )


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if hasattr(torch.optim, name)])
@distributed(2, backends=WITH_NPU)
def test_optimizer_steps_as_in_one_process(name: str, world: World) -> None:
    # In float32 the quotients of Adam and its kin lose three digits where squares of gradients are small.
    tolerance = TOLERANCE if _real(world) == torch.float64 else 1e-4
    taken = set(inspect.signature(getattr(torch.optim, name)).parameters)
    ran = []
    # Newton-Schulz runs in bfloat16, where sums over a cut dim round otherwise; its program is proven in the wide dtype.
    wide = "double" if _real(world) == torch.float64 else "float"
    patches = [mock.patch.object(cls, "bfloat16", getattr(cls, wide)) for cls in (torch.Tensor, DTensor)]
    with patches[0], patches[1]:
        for options, (mode, how) in itertools.product(OPTIMIZERS[name], MODES.items()):
            if not set(how) <= taken:
                continue
            plain, cut = (_parameters(world, sharded=sharded, name=name) for sharded in (False, True))
            lists = {"foreach": how.get("foreach", None)}
            try:
                one = _made(name, plain, {**options, **how})
                expected = _train(plain, one, **lists)
            except (RuntimeError, AssertionError, ValueError) as error:
                # What torch does not have on this device, or at all: then nor for DTensors.
                assert set(how) & {"fused", "capturable", "lr"} or name == "SparseAdam", error
                with pytest.raises(type(error), match=re.escape(str(error))):
                    _train(cut, _made(name, cut, {**options, **how}), **lists)
                continue
            optimizer = _made(name, cut, {**options, **how})
            found = _train(cut, optimizer, **lists)
            ran.append(mode)
            for x, y in zip([*found, *cut], [*expected, *plain], strict=True):
                assert_parity(x, y, rtol=tolerance, atol=tolerance, name=f"{name} {mode}")
            _check_state(optimizer, cut)
    assert ran or name == "SparseAdam"
    if "capturable" in taken and world.device_type != "cpu":
        assert {"capturable", "capturable lists"} <= set(ran)


def _check_state(optimizer: Any, parameters: list[Any]) -> None:
    """What is as large as a parameter lies as it does."""
    for parameter in parameters:
        for key, state in optimizer.state[parameter].items():
            if (
                key != "step"
                and isinstance(state, torch.Tensor)
                and state.shape == parameter.shape
                and state.ndim
            ):
                assert state.placements == parameter.placements, key


@distributed(2, backends=TORCH)
def test_muon_in_bfloat16_rounds_only_as_its_sums_are_ordered(world: World) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    moved = []
    for sharded in (False, True):
        parameters = _parameters(world, sharded=sharded, name="Muon")
        before = [p.detach().clone() for p in parameters]
        _train(parameters, torch.optim.Muon(parameters, lr=LR))
        moved.append([p.detach() - b for p, b in zip(parameters, before, strict=True)])
    for i, (mine, plain) in enumerate(zip(moved[1], moved[0], strict=True)):
        # Gradients and norms differ by 1e-16, which may round to the next bfloat16; then five rounds of a polynomial with a
        # slope of 3.4 multiply the difference.
        assert_parity(mine, plain, rtol=0.0, atol=0.1 * LR, name=str(i))


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


@distributed(2, backends=TORCH)
def test_the_older_spelling_of_new_empty_takes_sizes_only(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    x = distribute_tensor(torch.zeros(5, dtype=torch.float64, device=world.device), mesh, [Shard(0)])
    assert x.new(5).placements == (Shard(0),)
    assert_parity(x.new(2, 3).zero_(), torch.zeros(2, 3, dtype=torch.float64), exact=True)
    with pytest.raises(ValueError, match="new of a DTensor takes sizes"):
        x.new([1.0, 2.0])
