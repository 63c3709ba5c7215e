"""How ranks of torch meet: one rank, given stores, torchrun, a world that the user made."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from hp_platform.torch import TorchPlatform, build_platform


@pytest.fixture(scope="module")
def platform() -> TorchPlatform:
    return build_platform()


@pytest.fixture
def world_of_one(platform: TorchPlatform, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``make(**changes)`` of create_world's arguments; the world is destroyed afterwards."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    assert not dist.is_initialized(), "this process must not be a rank of another world"
    defaults = dict.fromkeys(("backend", "init_method", "store", "device_id", "options"))
    given = {"device_type": "cpu", "rank": 0, "world_size": 1, "timeout": timedelta(seconds=20)}
    yield lambda **changes: platform.create_world(**{**defaults, **given, **changes})
    if dist.is_initialized():
        platform.destroy_group(None)


def test_a_world_of_one_needs_no_address(platform: TorchPlatform, world_of_one: Any) -> None:
    assert platform.adopt_world() is None
    group, name, store = world_of_one()
    assert (name, platform.native_ranks(group), platform.native_rank(group)) == ("gloo", (0,), 0)
    platform.store_set(store, "key", b"value")
    assert platform.store_get(store, "key") == b"value"
    platform.destroy_group(None)
    assert not dist.is_initialized()


def test_ranks_without_a_meeting_place_are_told_what_to_set(world_of_one: Any) -> None:
    with pytest.raises(RuntimeError, match="rank 1 of 2 .* set MASTER_ADDR and MASTER_PORT"):
        world_of_one(rank=1, world_size=2)


def test_a_given_store_or_method_is_used(platform: TorchPlatform, world_of_one: Any, tmp_path: Any) -> None:
    given = dist.HashStore()
    _, _, store = world_of_one(store=given)
    platform.store_set(store, "key", b"value")
    assert any("key" in key for key in given.list_keys())
    platform.destroy_group(None)
    world_of_one(init_method=f"file://{tmp_path}/meet")
    assert dist.get_world_size() == 1


def test_under_torchrun_its_own_store_is_used(world_of_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    _, _, store = world_of_one()  # would fail to listen on the port if it made a store of its own
    store.set("ours", "1")
    assert agent.num_keys() > 0


def test_a_world_that_the_user_made_is_adopted(platform: TorchPlatform, world_of_one: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    adopted = platform.adopt_world()
    assert adopted is not None
    group, name, store = adopted
    assert (group, name) == (dist.group.WORLD, "gloo")
    assert store is not None
