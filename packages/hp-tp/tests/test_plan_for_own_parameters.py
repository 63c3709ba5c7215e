"""Models whose own code computes with parameters, beside the layers that a plan knows: scales, tables of positions, temperatures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import DTensor, Replicate
from hp_platform.testing import World, distributed
from hp_tp import ColwiseParallel, PrepareHidden, plan_for

sys.path.insert(0, str(Path(__file__).parent))
from tp_models import Config, Maker, classes, token_ids
from tp_training import check_steps, mean_square

CONFIG = Config(layers=1, length=5)


def own_parameters(world: World, where: str) -> Any:
    """A model that owns parameters at the root, in the module that has the layers (``"body"``), or in both."""
    platform, maker = world.platform, Maker(world)
    plain = classes(platform).Model(maker, CONFIG)

    class Body(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers, self.norm = plain.embed, plain.layers, plain.norm
            if where != "root":
                self.positions = platform.parameter(maker.tensor(CONFIG.length, CONFIG.width))

        def forward(self, ids: Any) -> Any:
            x = self.embed(ids)
            if where != "root":
                x = x + self.positions
            for layer in self.layers:
                x = layer(x)
            return self.norm(x)

    class Model(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Body(), plain.head
            if where != "body":
                self.shift = platform.parameter(maker.tensor(CONFIG.width))
                self.temperature = platform.parameter(maker.tensor(CONFIG.vocabulary))

        def forward(self, ids: Any) -> Any:
            x = self.body(ids)
            if where == "body":
                return self.head(x)
            return self.head(x * self.shift) * self.temperature

    return Model()


@pytest.mark.parametrize("where", ["root", "body", "both"])
@distributed(world_size=2, timeout=120)
def test_what_a_model_owns_itself_is_trained_as_in_one_process(world: World, where: str) -> None:
    def loss_of(model: Any, step: int) -> Any:
        return mean_square(world.platform, model(token_ids(world, CONFIG, step)[0]))

    switches = [(True, True), (False, False)] + ([(True, False), (False, True)] if where == "both" else [])
    for sequence, loss in switches:
        plan = plan_for(own_parameters(world, where), sequence_parallel=sequence, loss_parallel=loss)
        model = check_steps(world, lambda: own_parameters(world, where), plan, loss_of, steps=2)
        owned = [model.body.positions] if where != "root" else []
        owned.extend([model.shift, model.temperature] if where != "body" else [])
        assert all(isinstance(p, DTensor) and p.placements == (Replicate(),) for p in owned)


@distributed(world_size=1)
def test_the_stream_consists_of_dtensors_where_the_model_owns_parameters(world: World) -> None:
    for where in ("root", "body"):
        plan = plan_for(own_parameters(world, where), sequence_parallel=False, loss_parallel=False)
        assert plan["body.embed"].use_local_output == (where == "body")
        assert plan["body.layers.*.mlp.down"].use_local_output == (where == "body")
        assert isinstance(plan["head"], ColwiseParallel)
        assert plan["head"].use_local_output == (where == "body")
    plan = plan_for(own_parameters(world, "both"))
    assert isinstance(plan["body"], PrepareHidden)
    assert plan.replicated == {"": "no usual name", "body": "no usual name"}
    assert "it meets the hidden states of its layers" in str(plan)
