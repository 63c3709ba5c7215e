"""``loss_parallel``: the framework's own losses on DTensors whose classes are cut."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np

from hp_dtensor import Partial, Replicate, Shard
from hp_platform.testing import World, count_collectives, distributed
from hp_tp import loss_parallel, vocab_parallel_cross_entropy

sys.path.insert(0, str(Path(__file__).parent))
from cut_losses import Losses
from loss_oracle import Loss, check_near, numbers, targets


@distributed((1, 2, 3, 4))
def test_every_reduction_weight_and_smoothing_is_that_of_one_process(world: World) -> None:
    losses = Losses(world)
    scores, weights = numbers(5, 50), np.abs(numbers(50, seed=2)) + 0.1
    lies = (None, Replicate(), Shard(0))
    for reduction, ignored, lie, smoothing in itertools.product(
        ("none", "mean", "sum"), ("none", "some", "all"), lies, (0.0, 0.1)
    ):
        loss = Loss(
            scores, targets(50, 5, ignored=ignored), None if lie is None else weights, reduction, smoothing
        )
        logits = losses.tensor(scores, Shard(-1), requires_grad=True)
        weight = None if lie is None else losses.tensor(weights, lie)
        with loss_parallel():
            found = losses.cross_entropy(logits, loss, weight)
        assert found.placements == (Replicate(),)
        losses.check(
            found, logits, loss, f"{reduction}, ignored {ignored}, weights {lie}, smoothing {smoothing}"
        )


@distributed((2, 4))
def test_vocabularies_that_do_not_divide_and_ranks_without_classes_are_exact(world: World) -> None:
    losses = Losses(world)
    for num_classes, lie in itertools.product((1, 2, 3, 5, 7), (Replicate(), Shard(0))):
        weights = np.arange(1.0, num_classes + 1)
        loss = Loss(numbers(4, num_classes), targets(num_classes, 4), weights, "mean", 0.2)
        logits = losses.tensor(loss.scores, Shard(1), requires_grad=True)
        with loss_parallel():
            found = losses.cross_entropy(logits, loss, losses.tensor(weights, lie))
        losses.check(found, logits, loss, f"{num_classes} classes, weights {lie}")


@distributed(4)
def test_rows_may_be_cut_over_another_mesh_dim(world: World) -> None:
    losses = Losses(world, (2, world.size // 2))
    for reduction, rows in itertools.product(("none", "mean", "sum"), (5, 1)):
        loss = Loss(numbers(rows, 7), targets(7, rows), np.arange(1.0, 8), reduction, 0.1)
        for placements in (
            (Shard(0), Shard(1)),
            (Shard(1), Shard(0)),
            (Shard(1), Shard(1)),
            (Replicate(), Shard(1)),
        ):
            logits = losses.tensor(loss.scores, *placements, requires_grad=True)
            target = losses.tensor(
                loss.target, *(Shard(0) if p == Shard(0) else Replicate() for p in placements), dtype="int64"
            )
            with loss_parallel(mesh=losses.mesh):
                found = losses.cross_entropy(
                    logits, loss, losses.tensor(loss.weight, Replicate(), Replicate()), target
                )
            losses.check(found, logits, loss, f"{reduction} of {rows} rows, {placements}")
            with loss_parallel(strict=False):
                assert tuple(losses.cross_entropy(logits, loss).shape) == tuple(found.shape)


@distributed(2)
def test_logits_of_any_rank_are_taken(world: World) -> None:
    losses = Losses(world)
    for shape in ((5,), (2, 5, 3), (2, 5, 3, 2), (0, 5)):
        of_target = shape[:1] + shape[2:] if len(shape) > 1 else ()
        loss = Loss(numbers(*shape), targets(5, *of_target), None, "sum", 0.0)
        logits = losses.tensor(loss.scores, Shard(min(1, len(shape) - 1)), requires_grad=True)
        with loss_parallel():
            found = losses.cross_entropy(logits, loss)
        losses.check(found, logits, loss, f"{shape}")


@distributed((2, 4))
def test_log_softmax_and_nll_loss_stay_cut_and_have_true_gradients(world: World) -> None:
    losses, functional = Losses(world), Losses(world).functional
    for num_classes, dim in itertools.product((1, 3, 50), (-1, 1)):
        scores, upstream = numbers(4, num_classes), numbers(4, num_classes, seed=3)
        logits = losses.tensor(scores, Shard(1), requires_grad=True)
        with loss_parallel():
            logs = functional.log_softmax(logits, dim)
        assert logs.placements == (Shard(1),)
        (logs * losses.tensor(upstream, Shard(1))).sum().backward()
        expected = scores - np.log(np.exp(scores).sum(1, keepdims=True))
        gradient = upstream - np.exp(expected) * upstream.sum(1, keepdims=True)
        check_near(logs.full_tensor(), expected, name=f"{num_classes} classes: values", atol=losses.atol)
        check_near(
            logits.grad.full_tensor(), gradient, name=f"{num_classes} classes: gradient", atol=losses.atol
        )
        for reduction in ("none", "mean", "sum"):
            loss = Loss(scores, targets(num_classes, 4), np.arange(1.0, num_classes + 1), reduction)
            logits = losses.tensor(scores, Shard(1), requires_grad=True)
            target = world.platform.tensor(loss.target, "int64", world.device)
            with loss_parallel():
                found = functional.nll_loss(
                    functional.log_softmax(logits, dim),
                    target,
                    losses.tensor(loss.weight, Replicate()),
                    reduction=reduction,
                )
            losses.check(found, logits, loss, f"{num_classes} classes, {reduction}, decomposed")


@distributed((2, 4))
def test_numbers_of_rows_are_communicated_and_no_logits(world: World) -> None:
    losses, functional = Losses(world), Losses(world).functional
    itemsize = world.platform.itemsize(losses.dtype)
    loss = Loss(numbers(6, 50), targets(50, 6))
    logits = losses.tensor(loss.scores, Shard(1), requires_grad=True)
    target = world.platform.tensor(loss.target, "int64", world.device)
    for function in (functional.cross_entropy, vocab_parallel_cross_entropy):
        if world.backend == "mindspore" and function is functional.cross_entropy:
            continue  # there it is made of the two below
        with loss_parallel(), count_collectives() as counted:
            found = function(logits, target)
        counted.assert_counts(all_reduce=2)
        assert counted.nbytes() == itemsize * 6 * 3
        with count_collectives() as counted:
            found.backward()
        counted.assert_counts()
    with loss_parallel(), count_collectives() as counted:
        logs = functional.log_softmax(logits, -1)
    counted.assert_counts(all_reduce=2)
    assert counted.nbytes() == itemsize * 6 * 2
    with loss_parallel(), count_collectives() as counted:
        found = functional.nll_loss(logs, target)
    counted.assert_counts(all_reduce=1)
    assert counted.nbytes() == itemsize * 6
    with count_collectives() as counted:
        found.backward()
    counted.assert_counts(all_reduce=1)
    assert counted.nbytes() == itemsize * 6


@distributed(2)
def test_blocks_may_be_nested_and_outside_the_same_numbers_come_of_moved_logits(world: World) -> None:
    losses = Losses(world)
    loss = Loss(numbers(4, 5), targets(5, 4))
    for enter in (False, True):
        logits = losses.tensor(loss.scores, Shard(1), requires_grad=True)
        with loss_parallel():
            if enter:
                with loss_parallel(mesh=losses.mesh):
                    assert losses.cross_entropy(logits, loss).shape == ()
                found = losses.cross_entropy(logits, loss)
        if not enter:
            with count_collectives() as counted:
                found = losses.cross_entropy(logits, loss)
            assert {"all_to_all", "all_gather"} & set(counted.counts), "outside of a block the logits travel"
        losses.check(found, logits, loss, f"nested {enter}")


@distributed(2)
def test_other_operations_and_softmax_are_as_outside(world: World) -> None:
    losses = Losses(world)
    x = losses.tensor(numbers(4, 6), Shard(0))
    y = losses.tensor(numbers(4, 6), Shard(1))
    with loss_parallel():
        by_rows = losses.functional.log_softmax(x, -1)
        shares = losses.functional.softmax(y, -1)
        target = world.platform.tensor([0, 1, 2, 3], "int64", world.device)
        plain = world.platform.cross_entropy(x.full_tensor(), target)
    assert by_rows.placements == (Shard(0),)
    expected = np.exp(numbers(4, 6))
    expected = expected / expected.sum(1, keepdims=True)
    check_near(by_rows.full_tensor(), np.log(expected), name="log_softmax", atol=losses.atol)
    check_near(shares.full_tensor(), expected, name="softmax", atol=losses.atol)
    value, _ = Loss(numbers(4, 6), np.arange(4)).value_and_gradient()
    check_near(plain, value, name="plain", atol=losses.atol)


@distributed(2)
def test_a_sum_of_logits_is_reduced_first(world: World) -> None:
    losses = Losses(world, (1, world.size))
    for reduction in ("mean", "none"):
        loss = Loss(numbers(4, 5), targets(5, 4), None, reduction)
        x = losses.tensor(loss.scores, Replicate(), Shard(1), requires_grad=True)
        with loss_parallel(mesh=losses.mesh):
            found = losses.cross_entropy(x.redistribute(placements=[Partial(), Shard(1)]), loss)
        losses.check(found, x, loss, reduction)
