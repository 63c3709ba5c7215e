"""A block of products that overlap with their communication, its numbers, and the same in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_dtensor.chunk import chunk_offset, chunk_size, chunk_sizes
from hp_dtensor.transport import Cut
from hp_platform.testing import World
from hp_tp.overlap import OverlapPolicy, all_gather_matmul, matmul_reduce_scatter

PLAIN = OverlapPolicy()  # no input here is so large that anything runs beside
WHOLE = OverlapPolicy(min_nbytes=0, features_per_peer=1000)  # products are not cut, but gradients run beside
CUT = OverlapPolicy(min_nbytes=0, features_per_peer=0, chunk_nbytes=0, max_chunks=3)
SENDS = OverlapPolicy(min_nbytes=0, chunk_nbytes=0, max_chunks=2, gather_by="sends")
# Shape of the whole but for its features, and the dim that is cut.
LAYOUTS = {
    "one row": ((1,), 0),
    "rows": ((12,), 0),
    "prime rows": ((7,), 0),
    "no rows": ((0,), 0),
    "one sequence": ((1, 24, ), 1),
    "sequences": ((2, 12), 1),
    "prime sequences": ((3, 5), 1),
    "no sequence": ((0, 4), 1),
    "sequence first": ((12, 3), 0),
    "something between": ((2, 4, 3), 1),
}  # fmt: skip


def cut_of(world: World, length: int, dim: int, *, is_turned: bool = False) -> Cut:
    """How a dim is dealt; turned: along a mesh dim whose ranks descend."""
    assert world.group is not None
    places = tuple(range(world.size))
    index = world.size - 1 - world.rank if is_turned else world.rank
    return Cut(
        world.group, places[::-1] if is_turned else places, index, dim, chunk_sizes(length, world.size)
    )


def part(x: np.ndarray, dim: int, index: int, num_ranks: int) -> np.ndarray:
    """A rank's piece."""
    start, size = chunk_offset(x.shape[dim], num_ranks, index), chunk_size(x.shape[dim], num_ranks, index)
    return np.take(x, range(start, start + size), dim)


@dataclass
class Numbers:
    """Inputs, weights and what the loss weighs results with, by name."""

    values: dict[str, np.ndarray]

    @classmethod
    def of(cls, world: World, lead: tuple[int, ...], hidden: int) -> Numbers:
        random = np.random.default_rng(3)
        shapes = {
            "x": (*lead, 5),
            "first": (hidden, 5),
            "second": (hidden, 5),
            "third": (hidden, 5),
            "bias": (hidden,),
            "last": (4, hidden),
            "loss": (*lead, 4),
        }
        dtype = "float64" if world.platform.supports("reduce_float64", world.device_type) else "float32"
        return cls({name: random.normal(size=shape).astype(dtype) for name, shape in shapes.items()})


# Along which dim a rank holds a part of what.
FEATURES = {"first": 0, "second": 0, "third": 0, "bias": 0, "last": 1}


def leaves(world: World, values: dict[str, np.ndarray], frozen: tuple[str, ...] = ()) -> dict[str, Any]:
    platform = world.platform
    made = {name: platform.tensor(value, device=world.device) for name, value in values.items()}
    return {
        name: x if name in frozen or name == "loss" else platform.set_requires_grad_(x, True)
        for name, x in made.items()
    }


def block(platform: Any, first: Any, second: Any, third: Any) -> Any:
    """Something between the products that is not linear."""
    return platform.silu(first) * second + third * third


def parallel(world: World, t: dict[str, Any], cut: Cut, policy: OverlapPolicy) -> Any:
    """Two weights share the gather as operands, the third one takes what has been gathered."""
    platform = world.platform
    (first, second), whole = all_gather_matmul(
        t["x"], [t["first"], t["second"]], cut, biases=[t["bias"], None], policy=policy
    )
    third = platform.linear(whole, t["third"])
    return matmul_reduce_scatter(block(platform, first, second, third), t["last"], cut, policy=policy)


def local(values: dict[str, np.ndarray], cut: Cut) -> dict[str, np.ndarray]:
    """This rank's parts."""
    num_ranks = len(cut.sizes)
    dims = {**FEATURES, "x": cut.dim, "loss": cut.dim}
    return {name: part(value, dims[name], cut.index, num_ranks) for name, value in values.items()}
