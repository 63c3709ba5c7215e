"""The memory plan counts peer memory where it is taken, and what collectives need instead where it is not."""

from __future__ import annotations

import os

import pytest
import torch

from hp_fsdp import MixedPrecisionPolicy, fully_shard, memory_plan
from hp_fsdp.halves import half_numel
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed


def sharded(world: World) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4)).to(world.device)
    policy = MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="float32")
    return fully_shard(model, init_device_mesh(world.device_type, (world.size,)), mp_policy=policy)


def reaching(patch: pytest.MonkeyPatch, world: World, domain: str | None) -> None:
    """Let this rank's device be one that reaches those of ``domain``."""
    kind = type(world.platform)
    supports = kind.supports
    patch.setattr(kind, "supports", lambda p, name, d=None: name == "peer_memory" or supports(p, name, d))
    patch.setattr(kind, "peer_domain", lambda p, device: domain)


@pytest.mark.parametrize(
    ("local_size", "domains", "is_counted_before"),
    [
        (1, ("a", "b"), False),
        (2, (None, None), False),
        (2, ("a", "b"), True),
        (None, ("a", "b"), True),
    ],
    ids=["other hosts", "devices reach nobody", "two machines in one", "launcher tells no hosts"],
)
@distributed(2, backends="torch")
def test_ranks_that_do_not_reach_each_other_have_the_plan_of_collectives(
    world: World, local_size: int | None, domains: tuple[str | None, ...], is_counted_before: bool
) -> None:
    collectives = memory_plan(sharded(world))
    assert collectives.peers == 0
    with pytest.MonkeyPatch.context() as patch:
        reaching(patch, world, domains[world.rank])
        if local_size is None:
            patch.delenv("LOCAL_WORLD_SIZE")
        else:
            patch.setenv("LOCAL_WORLD_SIZE", str(local_size))
            patch.setenv("LOCAL_RANK", str(int(os.environ["RANK"]) % local_size))
        model = sharded(world)
        before = memory_plan(model)
        if is_counted_before:
            longest = sum(p.to_local().numel() for p in model.parameters()) + 8
            uses = [2 * 2 * half_numel(use, longest, 2, 2) for use in ("gather", "exchange")]
            assert before.peers == sum(uses)
            assert before.reductions < collectives.reductions
        else:
            assert before == collectives
        model(torch.ones(3, 8)).float().sum().backward()
        assert memory_plan(model) == collectives
