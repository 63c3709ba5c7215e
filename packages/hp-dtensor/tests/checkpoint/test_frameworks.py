"""A checkpoint written under one framework loads under the other: the bytes are the same."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor, load, save
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed

WRITTEN = Path(__file__).with_name("written")
"""By write_fixture.py, under each framework."""
FRAMEWORKS = ("torch", "mindspore")


def _content(world: World) -> dict[str, Any]:
    namespace = runpy.run_path(str(WRITTEN.with_name("write_fixture.py")))
    state: dict[str, Any] = namespace["content"](world.device_type, world.device)
    return state


def _files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@distributed(world_size=2)
def test_both_frameworks_write_the_same_bytes(tmp_path: Path, world: World) -> None:
    save(_content(world), tmp_path)
    ours = _files(tmp_path)
    assert sorted(ours) == [
        "000001/index.json",
        "000001/rank-00000.safetensors",
        "000001/rank-00001.safetensors",
        "latest",
    ]
    for framework in FRAMEWORKS:
        assert _files(WRITTEN / framework) == ours, framework


@pytest.mark.parametrize("framework", FRAMEWORKS)
@distributed(world_size=(1, 2))
def test_what_either_framework_wrote_loads_into_any_layout(framework: str, world: World) -> None:
    platform, mesh = world.platform, init_device_mesh(world.device_type, (world.size,))
    numbers = platform.reshape(platform.arange(0, 15, "float32", world.device), (5, 3))
    for placement in (Shard(0), Shard(1), Replicate()):

        def at(x: Any, placement: Any = placement) -> Any:
            return distribute_tensor(x, mesh, [placement])

        wanted = {
            "layers.0.weight": at(numbers - 7),
            "layers.0.bias": at(platform.cast(numbers, "bfloat16")),
            "half": at(platform.cast(numbers, "float16")),
        }
        model = {
            name: DTensor.from_local(platform.zeros_like(x.to_local()), mesh, [placement], shape=(5, 3))
            for name, x in wanted.items()
        }
        mine = {
            "model": model,
            "optimizer": {
                "state": {0: {"step": platform.tensor(0, "int64", world.device)}},
                "groups": [{"lr": 0.0, "betas": (0.9, 0.95)}],
            },
            "mask": platform.zeros((3,), "bool", world.device),
            "name": "",
            "best": 1,
        }
        assert load(mine, WRITTEN / framework).is_exact
        for name, x in wanted.items():
            assert (
                platform.to_bits(model[name].to_local()).tobytes() == platform.to_bits(x.to_local()).tobytes()
            )
        assert platform.to_numpy(mine["mask"]).tolist() == [True, False, True]
        assert int(platform.to_numpy(mine["optimizer"]["state"][0]["step"])) == 12
        assert (mine["name"], mine["best"], mine["optimizer"]["groups"][0]["lr"]) == (
            "a/b~c \u20ac",
            None,
            0.1,
        )
