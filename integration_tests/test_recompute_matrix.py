"""A small transformer with dropout, checkpointed in every way: outputs, gradients and random numbers of the plain one, to the bit.

Policies are crossed with nesting, with ``fully_shard`` and with the order in which three micro-batches go backward, as pipeline
schedules have it. What is kept of a call is what its policy says, in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from hp_dtensor import DTensor, manual_seed
from hp_dtensor import random as hp_random
from hp_fsdp import fully_shard
from hp_platform import default_random_stream, init_device_mesh
from hp_platform.testing import World, distributed
from hp_recompute import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_exclude_wrapper,
    checkpoint_wrapper,
    keep_collectives_policy,
)
from hp_recompute.checkpointing import region as regions

BATCH, LENGTH, DIM, HEADS, HIDDEN = 1, 3, 8, 2, 12
LAYERS = 3
ORDERS = {"one": (0,), "first in, first out": (0, 1, 2), "mixed": (1, 0, 2), "last in, first out": (2, 1, 0)}


def widest(world: World) -> str:
    return "float64" if world.platform.supports("float64_compute", world.device) else "float32"


def make_model(world: World) -> Any:
    platform, random = world.platform, np.random.default_rng(0)

    def weight(rows: int, columns: int) -> Any:
        values = random.uniform(-0.5, 0.5, (rows, columns))
        return platform.parameter(platform.tensor(values, widest(world), world.device))

    class Attention(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (weight(DIM, DIM) for _ in range(4))

        def forward(self, x: Any) -> Any:
            def heads(w: Any) -> Any:
                y = platform.reshape(platform.linear(x, w), (BATCH, LENGTH, HEADS, DIM // HEADS))
                return platform.transpose(y, 1, 2)

            scores = platform.matmul(heads(self.q), platform.transpose(heads(self.k), 2, 3))
            weights = hp_random.dropout(platform.softmax(scores, -1), 0.25)
            mixed = platform.transpose(platform.matmul(weights, heads(self.v)), 1, 2)
            return platform.linear(platform.reshape(mixed, (BATCH, LENGTH, DIM)), self.o)

    class Block(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()
            self.up, self.down = weight(HIDDEN, DIM), weight(DIM, HIDDEN)

        def forward(self, x: Any) -> Any:
            x = x + self.attention(x)
            middle = platform.gelu(platform.linear(x, self.up))
            return platform.sin(x + hp_random.dropout(platform.linear(middle, self.down), 0.5))

    class Model(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = platform.ModuleList([Block() for _ in range(LAYERS)])

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return x

    return Model()


def policies(world: World) -> dict[str, dict[str, Any]]:
    """Options of ``checkpoint_wrapper``."""
    found: dict[str, dict[str, Any]] = {
        "full": {},
        "to the end": {"early_stop": False},
        "collectives": {"policy": keep_collectives_policy},
    }
    if not world.platform.supports("operation_dispatch", world.device):
        return found
    return found | {
        "products": {"policy": [world.platform.matmul]}
        if world.platform.operations_of(world.platform.matmul)
        else {"policy": lambda context, operation, *args, **kwargs: "mm" in str(operation)},
        "everything": {"policy": lambda context, operation, *args, **kwargs: True},
        "nothing": {"policy": lambda context, operation, *args, **kwargs: CheckpointPolicy.MUST_RECOMPUTE},
        "operations checked": {"determinism_check": "operations"},
    }


def blocks_alone(model: Any, options: dict[str, Any]) -> Callable[[Any], Any]:
    for block in model.blocks:
        checkpoint_wrapper(block, **options)
    return lambda x: model(x)


def attention_in_blocks(model: Any, options: dict[str, Any]) -> Callable[[Any], Any]:
    for block in model.blocks:
        own = block.attention
        checkpoint_wrapper(own, **options)
    whole = model.blocks
    return lambda x: _through(whole, lambda block, x: checkpoint(block, x), x)


def blocks_in_all(model: Any, options: dict[str, Any]) -> Callable[[Any], Any]:
    for block in model.blocks:
        checkpoint_wrapper(block, **options)
    return lambda x: checkpoint(model, x)


def attention_excluded(model: Any, options: dict[str, Any]) -> Callable[[Any], Any]:
    for block in model.blocks:
        checkpoint_exclude_wrapper(block.attention)
    return blocks_alone(model, options)


def _through(blocks: Any, call: Callable[[Any, Any], Any], x: Any) -> Any:
    for block in blocks:
        x = call(block, x)
    return x


NESTINGS = (blocks_alone, attention_in_blocks, blocks_in_all, attention_excluded)


def results(world: World, model: Any, run: Callable[[Any], Any], order: tuple[int, ...]) -> list[Any]:
    """Outputs, gradients and the state of the random numbers of as many micro-batches, backward in this order."""
    platform = world.platform
    manual_seed(3)
    random = np.random.default_rng(world.rank)
    inputs = [
        platform.set_requires_grad_(
            platform.tensor(random.uniform(-1, 1, (BATCH, LENGTH, DIM)), widest(world), world.device), True
        )
        for _ in order
    ]
    outputs = [run(x) for x in inputs]
    losses = [platform.sum(y * y) for y in outputs]
    for index in order:
        platform.backward([losses[index]])
    found = [platform.detach(y) for y in outputs]
    found.extend(platform.get_grad(x) for x in inputs)
    found.extend(platform.get_grad(p) for _, p in platform.named_parameters(model))
    values = [platform.to_numpy(x.full_tensor() if isinstance(x, DTensor) else x) for x in found]
    return [*values, np.array(list(default_random_stream().get_state().values()))]


def assert_equal(found: list[Any], expected: list[Any], case: object) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=str(case))


def sharded(world: World, model: Any) -> Any:
    mesh = init_device_mesh(world.device_type, (world.size,))
    for block in model.blocks:
        fully_shard(block, mesh)
    return fully_shard(model, mesh)


@pytest.mark.parametrize(
    ("name", "nesting"),
    [
        (name, nesting)
        for name in ORDERS
        for nesting in (NESTINGS if name in ("one", "mixed") else (blocks_alone,))
    ],
)
@distributed(world_size=1)
def test_all_policies_and_nestings_give_the_bits_of_the_plain_model(
    world: World, name: str, nesting: Any
) -> None:
    order = ORDERS[name]
    model = make_model(world)
    expected = results(world, model, model, order)
    for policy, options in policies(world).items():
        model = make_model(world)
        found = results(world, model, nesting(model, options), order)
        assert_equal(found, expected, policy)


@pytest.mark.parametrize("nesting", NESTINGS)
@distributed(world_size=2)
def test_all_policies_and_nestings_give_the_bits_of_the_sharded_model(world: World, nesting: Any) -> None:
    order = ORDERS["mixed"]
    model = sharded(world, make_model(world))
    expected = results(world, model, model, order)
    for policy, options in policies(world).items():
        model = make_model(world)
        run = nesting(model, options)
        sharded(world, model)
        assert_equal(results(world, model, run, order), expected, policy)


@contextmanager
def regions_made() -> Iterator[list[regions.Region]]:
    """All checkpointed calls inside."""
    made: list[regions.Region] = []
    own = regions.Region.__init__

    def noting(self: regions.Region, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        made.append(self)

    regions.Region.__init__ = noting  # type: ignore[method-assign]
    try:
        yield made
    finally:
        regions.Region.__init__ = own  # type: ignore[method-assign]


@distributed(world_size=1)
def test_what_is_kept_has_the_bytes_that_the_policy_says(world: World) -> None:
    platform = world.platform
    itemsize = platform.itemsize(platform.dtype(widest(world)))
    rows = BATCH * LENGTH
    # Four projections, the scores, what they mix, and the two products of the feed-forward part.
    products = rows * DIM * 4 + HEADS * LENGTH * LENGTH * BATCH + rows * DIM + rows * HIDDEN + rows * DIM
    said = {"full": 0, "to the end": 0, "collectives": 0, "nothing": 0, "operations checked": 0}
    for policy, options in policies(world).items():
        model = make_model(world)
        run = blocks_alone(model, options)
        saved: list[int] = []

        def pack(x: Any, saved: list[int] = saved) -> Any:
            saved.append(x.numel() * itemsize)
            return x

        x = platform.set_requires_grad_(
            platform.full((BATCH, LENGTH, DIM), 0.5, widest(world), world.device), True
        )
        with regions_made() as made, platform.saved_tensors_hooks(pack, lambda x: x):
            y = run(x)
        assert saved == [rows * DIM * itemsize] * LAYERS, (policy, "the input of each block")
        kept = [0 if each.kept is None else each.kept.nbytes for each in made]
        communicated = [0 if each.collectives is None else each.collectives.nbytes for each in made]
        assert communicated == [0] * LAYERS
        if policy == "products":
            assert kept == [products * itemsize] * LAYERS
        elif policy == "everything":
            assert min(kept) > products * itemsize
        else:
            assert kept == [said[policy]] * LAYERS
        platform.backward([platform.sum(y)])
