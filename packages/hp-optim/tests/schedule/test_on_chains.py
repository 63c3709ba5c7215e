"""A chain of real optimizers that is clipped, stepped, scheduled, saved and resumed."""

from __future__ import annotations

import numpy as np

from hp_dtensor import Shard, distribute_tensor
from hp_optim import clip_grad_norm_, get_hyper_lr_scheduler, get_hyper_optimizer
from hp_optim.pieces import local_of
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed


class Run:
    """A sharded matrix for Muon and a plain vector for AdamW; gradients are the parameters' own values, so steps differ."""

    def __init__(self, world: World, base: float = 0.5) -> None:
        platform = world.platform
        mesh = init_device_mesh(world.device_type, (world.size,))

        class Layer(platform.Module):  # type: ignore[name-defined, misc]
            def __init__(self) -> None:
                super().__init__()
                values = platform.tensor(np.arange(15.0).reshape(5, 3) - 7, "float32", world.device)
                self.weight = platform.parameter(distribute_tensor(values, mesh, [Shard(0)]))
                self.bias = platform.parameter(platform.full((3,), 2.0, "float32", world.device))

        self.platform, self.model = platform, Layer()
        self.parameters = [self.model.weight, self.model.bias]
        self.optimizer = get_hyper_optimizer(
            self.model, [self.model.weight], [self.model.bias], {"lr": base}, {"lr": base / 5}
        )
        self.schedule = get_hyper_lr_scheduler(
            self.optimizer, 10, warmup_steps=2, decay_style="linear", lr=1.0, lr_min=0.0
        )

    def step(self) -> float:
        """The norm before clipping."""
        for parameter in self.parameters:
            local = local_of(parameter)
            self.platform.set_grad(local, self.platform.clone(self.platform.detach(local)))
        norm = clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return float(self.platform.to_numpy(norm))

    def values(self) -> list[np.ndarray]:
        return [self.platform.to_numpy(self.platform.detach(local_of(p))) for p in self.parameters]


@distributed(world_size=(1, 2))
def test_every_optimizer_of_a_chain_follows_the_schedule(world: World) -> None:
    run = Run(world)
    assert list(run.schedule.state_dict()) == list(run.optimizer.optimizers_dict) == ["adamw", "muon"]
    expected = [0.0, 0.5, 1.0, 7 / 8, 6 / 8, 5 / 8]
    before = run.values()
    for step, factor in enumerate(expected):
        rates = [group["lr"] for group in run.optimizer.param_groups]
        np.testing.assert_allclose(rates, [0.1 * factor, 0.5 * factor], rtol=1e-15)
        assert run.schedule.get_last_lr() == rates
        norm = run.step()
        if step == 0:
            values = np.concatenate([np.arange(15.0) - 7, np.full(3, 2.0)])
            np.testing.assert_allclose(norm, np.linalg.norm(values), rtol=1e-6)
            for one, other in zip(before, run.values(), strict=True):
                np.testing.assert_array_equal(one, other)  # a rate of 0


@distributed(world_size=(1, 2))
def test_a_resumed_run_is_the_run_that_was_not_interrupted(world: World) -> None:
    straight, resumed = Run(world), Run(world)
    for _ in range(3):
        straight.step()
    resumed.optimizer.load_state_dict(straight.optimizer.state_dict())
    resumed.schedule.load_state_dict(straight.schedule.state_dict())
    for one, other in zip(straight.parameters, resumed.parameters, strict=True):
        world.platform.copy_(local_of(other), world.platform.detach(local_of(one)))
    for _ in range(3):
        straight.step()
        resumed.step()
    assert straight.schedule.state_dict() == resumed.schedule.state_dict()
    for one, other in zip(straight.values(), resumed.values(), strict=True):
        np.testing.assert_array_equal(one, other)


@distributed(world_size=1)
def test_the_rates_of_the_present_run_count_also_after_its_optimizer_was_loaded(world: World) -> None:
    """The saved groups carry their own rates; the schedule has those that it was made with."""
    saved, present = Run(world), Run(world, base=2.0)
    for _ in range(3):
        saved.step()
    present.optimizer.load_state_dict(saved.optimizer.state_dict())
    present.schedule.load_state_dict(saved.schedule.state_dict())
    np.testing.assert_allclose(present.schedule.get_last_lr(), [0.4 * 7 / 8, 2.0 * 7 / 8], rtol=1e-15)
    assert [group["lr"] for group in present.optimizer.param_groups] == present.schedule.get_last_lr()
