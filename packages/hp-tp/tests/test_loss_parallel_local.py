"""``vocab_parallel_cross_entropy``: plain local logits, as code cuts them by hand."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_dtensor.chunk import chunk_offset, chunk_size
from hp_platform import get_platform, init_device_mesh
from hp_platform.testing import World, count_collectives, distributed
from hp_tp import vocab_parallel_cross_entropy
from hp_tp.loss import rows

sys.path.insert(0, str(Path(__file__).parent))
from loss_oracle import Loss, check_near, numbers, targets


def dtype_of(world: World) -> str:
    return "float64" if world.platform.supports("float64_compute", world.device_type) else "float32"


def tolerance(world: World) -> dict[str, float]:
    """Sums of at most 50 terms near 1, in another order than the oracle's, and values near 10: some units in the last place."""
    return {"atol": 1e-12 if dtype_of(world) == "float64" else 2e-5}


class Ranks:
    """The ranks of a test as a mesh, and their parts of classes."""

    def __init__(self, world: World) -> None:
        self.world, self.platform = world, world.platform
        self.mesh = init_device_mesh(world.device_type, (world.size,), mesh_dim_names=("tp",))

    def own(self, x: Any, dim: int) -> Any:
        """This rank's part of numpy's ``x``."""
        n, world = x.shape[dim], self.world
        start = chunk_offset(n, world.size, world.rank)
        return np.take(x, range(start, start + chunk_size(n, world.size, world.rank)), dim)

    def tensor(self, x: Any, dtype: str | None = None) -> Any:
        return self.platform.tensor(np.array(x, order="C"), dtype or dtype_of(self.world), self.world.device)

    def check(self, loss: Loss, what: str) -> None:
        """Value and gradient of this rank's logits against the oracle."""
        platform = self.platform
        class_dim = 0 if loss.scores.ndim == 1 else 1
        logits = platform.set_requires_grad_(self.tensor(self.own(loss.scores, class_dim)), True)
        weight = None if loss.weight is None else self.tensor(loss.weight)
        found = vocab_parallel_cross_entropy(
            logits,
            self.tensor(loss.target, "int64"),
            num_classes=loss.scores.shape[class_dim],
            mesh=self.mesh,
            weight=weight,
            ignore_index=loss.ignore_index,
            reduction=loss.reduction,
            label_smoothing=loss.label_smoothing,
        )
        seed = None
        if loss.reduction == "none":
            seed = numbers(*np.shape(loss.target), seed=5)
            platform.backward([found], [self.tensor(seed)])
        else:
            assert tuple(found.shape) == ()
            platform.backward([found])
        value, gradient = loss.value_and_gradient(seed)
        close = tolerance(self.world)
        check_near(found, value, name=f"{what}: loss", **close)
        own = self.own(gradient, class_dim)
        check_near(
            platform.get_grad(logits), own, name=f"{what}: gradient on rank {self.world.rank}", **close
        )


@distributed((1, 2, 3, 4))
def test_every_reduction_weight_and_smoothing_is_that_of_one_process(world: World) -> None:
    ranks = Ranks(world)
    scores, weight = numbers(5, 50), np.abs(numbers(50, seed=2)) + 0.1
    cases = itertools.product(
        ("none", "mean", "sum"), ("none", "some", "all"), (None, weight), (0.0, 0.1, 1.0)
    )
    for reduction, ignored, weights, smoothing in cases:
        loss = Loss(scores, targets(50, 5, ignored=ignored), weights, reduction, smoothing)
        what = f"{reduction}, ignored {ignored}, weights {weights is not None}, smoothing {smoothing}"
        ranks.check(loss, what)


@distributed((1, 2, 3, 4))
def test_vocabularies_that_do_not_divide_and_ranks_without_classes_are_exact(world: World) -> None:
    ranks = Ranks(world)
    for num_classes, smoothing in itertools.product((1, 2, 3, 5, 7), (0.0, 0.2)):
        for reduction in ("none", "mean"):
            loss = Loss(
                numbers(4, num_classes),
                targets(num_classes, 4),
                np.arange(1.0, num_classes + 1),
                reduction,
                smoothing,
            )
            ranks.check(loss, f"{num_classes} classes, {reduction}, {smoothing}")


@distributed((2, 3))
def test_logits_of_any_rank_and_without_rows_are_taken(world: World) -> None:
    ranks = Ranks(world)
    for shape in ((5,), (1, 5), (2, 5, 3), (2, 5, 3, 2), (0, 5), (2, 5, 0)):
        of_target = shape[:1] + shape[2:] if len(shape) > 1 else ()
        for reduction in ("none", "sum", "mean"):
            loss = Loss(numbers(*shape), targets(5, *of_target), None, reduction, 0.1)
            ranks.check(loss, f"{shape}, {reduction}")


@distributed(2)
def test_another_class_may_be_the_ignored_one(world: World) -> None:
    ranks = Ranks(world)
    for ignore_index in (0, 4, 7, -1):
        target = np.array([0, 4, ignore_index, 2])
        ranks.check(
            Loss(numbers(4, 5), target, None, "mean", 0.0, ignore_index), f"ignore_index {ignore_index}"
        )


@distributed((2, 4))
def test_two_small_all_reduces_carry_all_and_backward_carries_nothing(world: World) -> None:
    ranks, platform = Ranks(world), world.platform
    itemsize = platform.itemsize(dtype_of(world))
    for smoothing, per_row in ((0.0, 2), (0.1, 3)):
        logits = platform.set_requires_grad_(ranks.tensor(ranks.own(numbers(6, 50), 1)), True)
        target = ranks.tensor(targets(50, 6), "int64")
        with count_collectives() as counted:
            loss = vocab_parallel_cross_entropy(
                logits, target, num_classes=50, group=world.group, label_smoothing=smoothing
            )
        counted.assert_counts(all_reduce=2)
        assert counted.nbytes() == itemsize * (6 + 6 * per_row)
        with count_collectives() as counted:
            platform.backward([loss])
        counted.assert_counts()


@distributed(2)
def test_work_in_blocks_of_rows_gives_the_same_numbers(world: World) -> None:
    ranks, whole = Ranks(world), rows.BLOCK
    try:
        rows.BLOCK = 40
        for shape in ((5, 50), (5, 50, 2)):
            loss = Loss(numbers(*shape), targets(50, 5, *shape[2:]), np.arange(1.0, 51), "mean", 0.1)
            ranks.check(loss, f"{shape}")
    finally:
        rows.BLOCK = whole


@distributed(2)
def test_infinite_and_missing_numbers_stay_in_their_rows(world: World) -> None:
    ranks = Ranks(world)
    scores = numbers(6, 5)
    scores[0, 0], scores[1, 4], scores[2, 1], scores[3, :] = -np.inf, np.inf, np.nan, -np.inf
    scores[4, :3] = -np.inf  # all classes of the first rank
    target = np.array([2, 1, 0, 3, 4, 1])
    found = vocab_parallel_cross_entropy(
        ranks.tensor(ranks.own(scores, 1)),
        ranks.tensor(target, "int64"),
        num_classes=5,
        mesh=ranks.mesh,
        reduction="none",
    )
    expected, _ = Loss(scores, target, None, "none").value_and_gradient(np.ones(6))
    check_near(found, expected, name="loss", **tolerance(world))


@distributed(2)
def test_sixteen_bit_logits_give_a_loss_in_float32_and_keep_no_wider_copy(world: World) -> None:
    ranks, platform = Ranks(world), world.platform
    halves = numbers(6, 50).astype(np.float16)
    logits = platform.set_requires_grad_(ranks.tensor(ranks.own(halves, 1), "float16"), True)
    kept: list[Any] = []
    with platform.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        loss = vocab_parallel_cross_entropy(
            logits, ranks.tensor(targets(50, 6), "int64"), num_classes=50, mesh=ranks.mesh
        )
    assert platform.dtype_name(loss.dtype) == "float32"
    wide = [x for x in kept if platform.itemsize(x.dtype) > 2 and len(x.shape) > 1]
    assert not wide, f"kept until backward: {[tuple(x.shape) for x in wide]}"
    platform.backward([loss])
    value, gradient = Loss(halves.astype(np.float64), targets(50, 6)).value_and_gradient()
    # Sums and exponentials are those of float32, of values near 3; the gradient is rounded to float16 once, values below 1.
    check_near(loss, value, name="loss", atol=1e-5)
    own = ranks.own(gradient, 1)
    assert platform.dtype_name(platform.get_grad(logits).dtype) == "float16"
    check_near(platform.get_grad(logits), own, name="gradient", atol=2.0**-11)


@distributed(2)
def test_two_losses_of_the_same_logits_add_up(world: World) -> None:
    ranks, platform = Ranks(world), world.platform
    scores = numbers(4, 7)
    logits = platform.set_requires_grad_(ranks.tensor(ranks.own(scores, 1)), True)
    expected, total = np.zeros_like(scores), None
    for seed in (1, 2):
        target = targets(7, 4, seed=seed)
        loss = vocab_parallel_cross_entropy(
            logits, ranks.tensor(target, "int64"), num_classes=7, mesh=ranks.mesh
        )
        total = loss if total is None else total + loss * 2
        expected = expected + seed * Loss(scores, target).value_and_gradient()[1]
    platform.backward([total])
    check_near(platform.get_grad(logits), ranks.own(expected, 1), name="gradient", **tolerance(world))


def test_without_ranks_it_is_the_cross_entropy_of_one_process() -> None:
    platform = get_platform()
    found = vocab_parallel_cross_entropy(platform.tensor([[0.0, 0.0]]), platform.tensor([1], "int64"))
    assert platform.to_numpy(found) == pytest.approx(np.log(2))
