"""Wrong calls are refused at once, with what was given and what to change."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_platform.testing import World, distributed
from hp_tp import ColwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parent))
from tp_models import Maker, make_mesh
from wrong_calls import CALLS


@pytest.mark.parametrize("name", list(CALLS))
@distributed(world_size=2)
def test_a_wrong_call_is_refused(world: World, name: str) -> None:
    call = CALLS[name]
    with pytest.raises(call.error, match=f"(?s){call.message}"):
        call.run(world)


def test_there_are_many_wrong_calls() -> None:
    assert len(CALLS) >= 40


@distributed(world_size=2)
def test_a_refused_style_leaves_the_module_as_it_was(world: World) -> None:
    platform = world.platform
    layer: Any = Maker(world).linear(6, 9)
    before = type(layer), {name: id(p) for name, p in platform.named_parameters(layer)}
    for style in (ColwiseParallel(heads=3), ColwiseParallel(parts=[4, 4]), ColwiseParallel(heads=5)):
        with pytest.raises(ValueError, match="ColwiseParallel"):
            parallelize_module(layer, make_mesh(world), style)
    assert (type(layer), {name: id(p) for name, p in platform.named_parameters(layer)}) == before
