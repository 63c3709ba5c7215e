"""Lists of modules: with a forward they are modules as others are, and without one nothing would gather for them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_fsdp import HSDPModule, fully_shard
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from attack_pairs import Pair
from fsdp_models import Maker


def chain(maker: Maker) -> Any:
    """A list that calls what it holds."""

    class Chain(maker.platform.ModuleList):  # type: ignore[name-defined,misc]
        def forward(self, x: Any, rank: int) -> Any:
            for each in self:
                x = maker.platform.silu(each(x))
            return x

    return Chain([maker.linear(5, 4), maker.linear(3, 5)])


@distributed(world_size=2)
def test_a_list_with_a_forward_trains_as_in_one_process(world: World) -> None:
    pair = Pair(world, chain, lambda model, mesh: fully_shard(model, mesh))
    assert isinstance(pair.sharded, HSDPModule)
    pair.backward(pair.loss())
    pair.backward(pair.reference_loss())
    pair.check()


@distributed(world_size=1, backends="torch")
@pytest.mark.parametrize("name", ["ModuleDict", "ParameterList", "ParameterDict"])
def test_other_containers_without_a_forward_are_refused_by_their_name(world: World, name: str) -> None:
    import torch

    module = getattr(torch.nn, name)()
    with pytest.raises(ValueError, match=rf"a {name} has no forward, .*or on the module that it hangs in"):
        fully_shard(module)


@pytest.mark.parametrize("has_length", [False, True])
@distributed(world_size=2)
def test_a_module_with_registered_methods_needs_no_forward(world: World, has_length: bool) -> None:
    from hp_fsdp import register_forward_method

    maker = Maker(world)
    platform = maker.platform

    class Encoder(platform.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = maker.linear(3, 4)

        def encode(self, x: Any) -> Any:
            return self.inner(x)

    class Codebook(Encoder):
        def __len__(self) -> int:
            return 3

    model = fully_shard(Codebook() if has_length else Encoder())
    register_forward_method(model, "encode")
    assert tuple(model.encode(platform.zeros((2, 4), maker.dtype, maker.device)).shape) == (2, 3)
