"""Which ranks get peer memory: all of a group, or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hp_platform.peers import may_reach_each_other, peer_memory
from hp_platform.testing import World, count_collectives, distributed

TORCH = ("torch", "cuda")


class Made:
    """What a device gives that reaches others."""

    def __init__(self, error: str) -> None:
        self.error, self.is_joined = error, False

    def join(self) -> None:
        if self.error == "no access":
            raise RuntimeError(self.error)
        self.is_joined = True


def reaching(patch: pytest.MonkeyPatch, world: World, domain: str | None, error: str = "") -> None:
    """Let this rank be in ``domain``, and fail with ``error`` if there is one."""

    def make(*_: Any) -> Made:
        if error == "no memory":
            raise RuntimeError(error)
        return Made(error)

    kind = type(world.platform)
    supports = kind.supports
    patch.setattr(kind, "supports", lambda p, name, d=None: name == "peer_memory" or supports(p, name, d))
    patch.setattr(kind, "peer_domain", lambda p, device: domain)
    patch.setattr(kind, "peer_memory", make)


@pytest.mark.parametrize(
    ("domains", "errors", "is_made"),
    [
        (("a", "a"), ("", ""), True),
        (("a", "b"), ("", ""), False),
        (("a", None), ("", ""), False),
        (("a", "a"), ("", "no access"), False),
        (("a", "a"), ("no memory", ""), False),
    ],
    ids=["one machine", "two machines", "one reaches nobody", "mapping fails on one", "one has no memory"],
)
@distributed(2, backends="torch")
def test_all_ranks_get_it_or_none(
    world: World, domains: tuple[str | None, ...], errors: tuple[str, ...], is_made: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch, count_collectives() as counted:
        reaching(patch, world, domains[world.rank], errors[world.rank])
        found = peer_memory(8, torch.float32, world.device, world.group)
    assert (isinstance(found, Made) and found.is_joined) if is_made else found is None
    counted.assert_counts()


@pytest.mark.parametrize(
    ("domain", "variables", "may"),
    [
        ("a", {"LOCAL_WORLD_SIZE": "2"}, True),
        (None, {"LOCAL_WORLD_SIZE": "2"}, False),
        ("a", {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, False),
        ("a", {"LOCAL_WORLD_SIZE": ""}, True),
        ("a", {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "RANK": "7", "WORLD_SIZE": "8"}, True),
    ],
    ids=["one host", "reaches nobody", "two hosts", "hosts unknown", "a launcher of other ranks"],
)
@distributed(2, backends="torch")
def test_a_rank_knows_by_itself_whether_they_may_reach_each_other(
    world: World, domain: str | None, variables: dict[str, str], may: bool
) -> None:
    assert world.group is not None
    with pytest.MonkeyPatch.context() as patch, count_collectives() as counted:
        assert not may_reach_each_other(world.device, world.group)
        reaching(patch, world, domain)
        for name, value in variables.items():
            if value:
                patch.setenv(name, value)
            else:
                patch.delenv(name)
        assert may_reach_each_other(world.device, world.group) is may
    counted.assert_counts()


@distributed((1, 2), backends=TORCH)
def test_where_devices_reach_each_other_what_one_writes_the_other_reads(world: World) -> None:
    found = peer_memory(8, torch.float32, world.device, world.group)
    if not world.platform.supports("peer_memory", world.device) or world.size == 1:
        assert found is None
        return
    handle = world.platform.device(world.device)
    if found is None:
        assert world.platform.peer_domain(world.device) is None, "GPUs of one machine"
        return
    assert handle.memory_allocated() >= 32
    own, other = found.of(world.rank), found.of(1 - world.rank)
    own.fill_(world.rank + 1.0)
    found.barrier()
    copy = torch.empty(8, device=world.device)
    found.copy_each([copy], [other])
    found.barrier()
    assert copy.tolist() == [2.0 - world.rank] * 8
