"""AdamW has the bits of torch.optim.AdamW(foreach=False), reads its state, and is copied and pickled as it is."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from hp_dtensor import Shard, distribute_tensor
from hp_optim import AdamW
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed

SHAPES = [(33, 17), (129,), (), (1, 2, 3), (0, 4), (16, 8)]
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no decay": {"weight_decay": 0.0, "lr": 0.1},
    "amsgrad": {"amsgrad": True, "betas": (0.8, 0.95)},
    "maximize": {"maximize": True, "weight_decay": 0.3, "eps": 1e-3, "betas": (0.3, 0.4)},
    "lr tensor": {"lr": torch.tensor(0.01)},
}


class Twins:
    def __init__(self, world: World, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.world, self.dtype = world, dtype
        values = [self.draw(shape) for shape in SHAPES]
        self.ours = [torch.nn.Parameter(value.clone()) for value in values]
        self.theirs = [torch.nn.Parameter(value.clone()) for value in values]

    def draw(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.world.device, self.dtype)

    def gradients(self, left_out: tuple[int, ...] = ()) -> None:
        for number, (a, b) in enumerate(zip(self.ours, self.theirs, strict=True)):
            gradient = self.draw(SHAPES[number])
            a.grad, b.grad = (None, None) if number in left_out else (gradient, gradient.clone())

    def check(self) -> None:
        for a, b in zip(self.ours, self.theirs, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(SETTINGS))
@distributed(world_size=1)
def test_steps_have_torchs_bits(world: World, name: str, dtype: torch.dtype) -> None:
    if world.device != "cpu" and dtype is torch.float64:
        dtype = torch.float32
    twins, setting = Twins(world, dtype), SETTINGS[name]
    ours = AdamW(twins.ours, fused=False, **setting)
    theirs = torch.optim.AdamW(twins.theirs, foreach=False, **setting)
    for left_out in ((), (1, 3), (), (0,), ()):
        twins.gradients(left_out)
        ours.step()
        theirs.step()
        twins.check()
    for a, b in zip(twins.ours, twins.theirs, strict=True):
        for key in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if setting.get("amsgrad") else [])):
            assert torch.equal(ours.state[a][key], theirs.state[b][key])


@distributed(world_size=1)
def test_the_fused_kernel_gives_nearly_the_same(world: World) -> None:
    if not world.platform.supports("fused_adamw", world.device):
        with pytest.raises(
            NotImplementedError, match="fused=True.* needs 'fused_adamw'.*leave out fused=True"
        ):
            AdamW(Twins(world, torch.float32).ours, fused=True)
        return
    twins = Twins(world, torch.float32)
    ours, theirs = AdamW(twins.ours, fused=True), torch.optim.AdamW(twins.theirs, foreach=False)
    for _ in range(3):
        twins.gradients()
        ours.step()
        theirs.step()
    for a, b in zip(twins.ours, twins.theirs, strict=True):
        # Another order of a dozen operations in each of three steps; steps are of the size of lr.
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("amsgrad", [False, True])
@distributed(world_size=1)
def test_the_fused_kernel_steps_parameters_that_lie_in_any_order(world: World, amsgrad: bool) -> None:
    """Of which state is contiguous, as that of a checkpoint is."""
    fused = world.platform.supports("fused_adamw", world.device)
    values = [torch.randn(4, 3, 2, 5, generator=torch.Generator().manual_seed(3)).to(world.device), None]
    values[1] = values[0][0, 0]
    lie = [torch.nn.Parameter(values[0].contiguous(memory_format=torch.channels_last))]
    lie.append(torch.nn.Parameter(values[1].t().contiguous().t()))
    usual = [torch.nn.Parameter(value.clone()) for value in values]
    assert not any(parameter.is_contiguous() for parameter in lie)
    ours, others = (AdamW(each, fused=fused, amsgrad=amsgrad, lr=0.1) for each in (lie, usual))
    for step in range(1, 4):
        for a, b in zip(lie, usual, strict=True):
            b.grad = (b.detach() * step).sin()
            a.grad = b.grad.clone() if step == 2 else torch.empty_like(a).copy_(b.grad)
        ours.step()
        others.step()
    for a, b in zip(lie, usual, strict=True):
        torch.testing.assert_close(a, b)
        assert list(ours.state[a]) == list(others.state[b])
        for key, value in ours.state[a].items():
            torch.testing.assert_close(value, others.state[b][key])


@pytest.mark.parametrize(
    ("before", "after"), [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)], ids=str
)
@distributed(world_size=1)
def test_a_parameter_that_became_wider_than_its_state_is_not_rounded_to_it(
    world: World, before: torch.dtype, after: torch.dtype
) -> None:
    model = torch.nn.Linear(4, 3).to(world.device, before)
    optimizer = AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    model.to(after)
    # float16 has none of them.
    value = torch.tensor([2.0**-30, 1 + 2.0**-7, 3e10], device=world.device).to(after)
    with torch.no_grad():
        model.bias.copy_(value)
    model.bias.grad = torch.zeros_like(model.bias)
    optimizer.param_groups[0]["lr"] = 0.0
    moments = [optimizer.state[model.bias][key].clone() for key in ("exp_avg", "exp_avg_sq")]
    optimizer.step()
    assert torch.equal(model.bias.detach(), value)
    for key, moment, beta in zip(("exp_avg", "exp_avg_sq"), moments, (0.9, 0.999), strict=True):
        found = optimizer.state[model.bias][key]
        assert found.dtype is before
        torch.testing.assert_close(found.float(), moment.float() * beta, rtol=2.0**-8, atol=0)


@distributed(world_size=1)
def test_the_state_of_torchs_own_is_taken_over_with_its_counts(world: World) -> None:
    twins = Twins(world, torch.float32)
    theirs = torch.optim.AdamW(twins.theirs, foreach=False, lr=0.1)
    for left_out in ((2,), (), (1,)):
        twins.gradients(left_out)
        theirs.step()
    for a, b in zip(twins.ours, twins.theirs, strict=True):
        a.data.copy_(b.data)
    ours = AdamW(twins.ours, fused=False)
    ours.load_state_dict(theirs.state_dict())
    for left_out in ((1,), (0, 1), ()):  # before and after the count was taken over
        twins.gradients(left_out)
        ours.step()
        theirs.step()
        twins.check()


@pytest.mark.parametrize("name", ["defaults", "amsgrad"])
@distributed(world_size=1)
def test_torchs_own_goes_on_from_its_state(world: World, name: str) -> None:
    twins = Twins(world, torch.float32)
    ours = AdamW(twins.ours, fused=False, **SETTINGS[name])
    before = torch.optim.AdamW(twins.theirs, foreach=False, **SETTINGS[name])
    for left_out in ((), (1, 3), (0,)):
        twins.gradients(left_out)
        ours.step()
        before.step()
    saved = ours.state_dict()
    assert all("step" not in entry for entry in ours.state.values()), "in the dict alone"
    theirs = torch.optim.AdamW(twins.theirs, foreach=False, **SETTINGS[name])
    theirs.load_state_dict(copy.deepcopy(saved))
    again = AdamW(twins.ours, fused=False, **SETTINGS[name])
    again.load_state_dict(saved)
    assert [sorted(entry) for entry in again.state.values()] == [
        sorted(entry) for entry in ours.state.values()
    ]
    for left_out in ((2,), (), (0, 1)):
        twins.gradients(left_out)
        again.step()
        theirs.step()
        twins.check()
    steps = {number: entry["step"].item() for number, entry in again.state_dict()["state"].items()}
    assert steps == {number: entry["step"].item() for number, entry in theirs.state_dict()["state"].items()}


@distributed(world_size=1)
def test_state_that_torchs_own_has_gone_on_from_comes_back_with_its_steps(world: World) -> None:
    """torch keeps our groups as they came, with a count of steps that stands still."""
    twins = Twins(world, torch.float32)
    ours = AdamW(twins.ours, fused=False)
    theirs = torch.optim.AdamW(twins.theirs, foreach=False)
    for left_out in ((1,), ()):
        twins.gradients(left_out)
        ours.step()
        theirs.step()
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    for left_out in ((), (3,), ()):
        twins.gradients(left_out)
        theirs.step()
    back = AdamW(twins.ours, fused=False)
    back.load_state_dict(copy.deepcopy(theirs.state_dict()))
    with torch.no_grad():
        for a, b in zip(twins.ours, twins.theirs, strict=True):
            a.copy_(b)
    for left_out in ((), (2,)):
        twins.gradients(left_out)
        back.step()
        theirs.step()
        twins.check()


@distributed(world_size=2)
def test_torchs_own_goes_on_from_the_state_of_shards(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    pair = []
    for kind in (AdamW, torch.optim.AdamW):
        torch.manual_seed(3)
        weight = torch.nn.Parameter(distribute_tensor(torch.randn(5, 3).to(world.device), mesh, [Shard(0)]))
        pair.append((weight, kind([weight], lr=0.1, fused=False)))

    def step(*which: int) -> None:
        torch.manual_seed(4)
        gradient = distribute_tensor(torch.randn(5, 3).to(world.device), mesh, [Shard(0)])
        for number in which:
            weight, optimizer = pair[number]
            weight.grad = gradient.clone()
            optimizer.step()

    step(0)
    with torch.no_grad():
        pair[1][0].copy_(pair[0][0])
    pair[1][1].load_state_dict(copy.deepcopy(pair[0][1].state_dict()))
    step(0, 1)
    torch.testing.assert_close(pair[1][0].to_local(), pair[0][0].to_local(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"]
)
@distributed(world_size=1, backends=("torch", "cuda", "npu"))
def test_a_copied_or_pickled_optimizer_goes_on_by_itself(world: World, how: Any) -> None:
    twins = Twins(world, torch.float32)
    first = AdamW(twins.ours, lr=0.1)
    twins.gradients()
    first.step()
    second = how(first)
    assert type(second) is AdamW
    assert isinstance(second, torch.optim.Optimizer)
    others = second.param_groups[0]["params"]
    assert all(a is not b for a, b in zip(others, twins.ours, strict=True))
    twins.gradients()
    for a, b in zip(twins.ours, others, strict=True):
        b.grad = a.grad.clone()
    second.step()
    assert not torch.equal(twins.ours[0], others[0])
    first.step()
    for a, b in zip(twins.ours, others, strict=True):
        assert torch.equal(a, b)


@distributed(world_size=1)
def test_a_sparse_gradient_is_refused_and_nothing_counts(world: World) -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True).to(world.device)
    optimizer = AdamW(embedding.parameters())
    embedding(torch.tensor([1, 2], device=world.device)).sum().backward()
    with pytest.raises(ValueError, match=r"of a parameter of shape \(4, 2\) is sparse.*sparse=False"):
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 0


@distributed(world_size=1)
def test_torchs_schedulers_and_dcp_take_it(world: World) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def made() -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2).to(world.device)
        return model, AdamW(model.parameters(), lr=0.1)

    (model, optimizer), (other_model, other) = made(), made()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    x = torch.ones(2, 3, device=world.device)
    for _ in range(2):
        model(x).square().sum().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    saved = get_optimizer_state_dict(model, optimizer)
    set_optimizer_state_dict(other_model, other, saved)
    other_model.load_state_dict(model.state_dict())
    for each_model, each in ((model, optimizer), (other_model, other)):
        each_model(x).square().sum().backward()
        each.step()
    assert torch.equal(model.weight, other_model.weight)
    assert other.param_groups[0]["step"] == 3
