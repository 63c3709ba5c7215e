"""Writes the checkpoint that stands in ``written/torch`` and ``written/mindspore``: run it once under each framework.

``HYPER_PARALLEL_PLATFORM=torch python write_fixture.py written/torch``, from the folder of this file.
"""

import sys
from typing import Any

from hp_dtensor import Replicate, Shard, distribute_tensor, save
from hp_platform import get_platform, init_device_mesh, launch


def content(device_type: str, device: str) -> dict[str, Any]:
    """A state with several dtypes, uneven pieces and every kind of value; the same whatever writes it."""
    platform = get_platform()
    mesh = init_device_mesh(device_type, (2,))
    numbers = platform.reshape(platform.arange(0, 15, "float32", device), (5, 3))
    return {
        "model": {
            "layers.0.weight": distribute_tensor(numbers - 7, mesh, [Shard(0)]),
            "layers.0.bias": distribute_tensor(platform.cast(numbers, "bfloat16"), mesh, [Shard(1)]),
            "half": distribute_tensor(platform.cast(numbers, "float16"), mesh, [Replicate()]),
        },
        "optimizer": {
            "state": {0: {"step": platform.tensor(12, "int64", device)}},
            "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}],
        },
        "mask": platform.tensor([True, False, True], "bool", device),
        "name": "a/b~c \u20ac",
        "best": None,
    }


def write(path: str) -> None:
    """On every rank."""
    save(content("cpu", "cpu"), path)


if __name__ == "__main__":
    launch.spawn(write, 2, args=(sys.argv[1],))
