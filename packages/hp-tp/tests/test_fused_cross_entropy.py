"""``linear_cross_entropy``: the loss of a linear layer without its logits, whole and with classes that are cut."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_dtensor.chunk import chunk_offset, chunk_size
from hp_platform import init_device_mesh
from hp_platform.testing import World, count_collectives, distributed
from hp_tp import linear_cross_entropy

sys.path.insert(0, str(Path(__file__).parent))
from loss_oracle import Loss, check_near, numbers, targets


@dataclass(frozen=True)
class Head:
    """A linear layer, what goes in, and the loss behind it."""

    x: Any
    weight: Any
    bias: Any
    loss: Loss

    @staticmethod
    def of(
        shape: Sequence[int],
        num_classes: int,
        *,
        has_bias: bool = True,
        ignored: str = "some",
        **options: Any,
    ) -> Head:
        x, weight = numbers(*shape, 4, seed=7), numbers(num_classes, 4, seed=8) * 0.5
        bias = numbers(num_classes, seed=9) if has_bias else None
        scores = (x @ weight.T + (0 if bias is None else bias)).reshape(-1, num_classes)
        target = targets(num_classes, *shape, ignored=ignored)
        return Head(x, weight, bias, Loss(scores, np.reshape(target, -1), **options))

    @property
    def target(self) -> Any:
        return np.reshape(self.loss.target, self.x.shape[:-1])

    def expected(self, seed: Any) -> tuple[Any, list[Any]]:
        """Value, and gradients of input, weight and bias."""
        value, of_scores = self.loss.value_and_gradient(None if seed is None else seed.reshape(-1))
        if self.loss.reduction == "none":
            value = value.reshape(self.x.shape[:-1])
        of_x = (of_scores @ self.weight).reshape(self.x.shape)
        return value, [of_x, of_scores.T @ self.x.reshape(-1, 4), of_scores.sum(0)]


class Heads:
    """The ranks of a test, and their parts of a layer."""

    def __init__(self, world: World, shape: tuple[int, ...] | None = None) -> None:
        self.world, self.platform = world, world.platform
        self.mesh = init_device_mesh(world.device_type, shape or (world.size,))
        self.dtype = "float64" if self.platform.supports("float64_compute", world.device_type) else "float32"
        # Sums of at most 50 terms, of values near 20, in another order than the oracle's: some units in the last place.
        self.atol = 1e-12 if self.dtype == "float64" else 5e-5

    def tensor(self, x: Any, dtype: str | None = None) -> Any:
        return self.platform.tensor(np.array(x, order="C"), dtype or self.dtype, self.world.device)

    def leaf(self, x: Any) -> Any:
        return self.platform.set_requires_grad_(self.tensor(x), True)

    def dtensor(self, x: Any, *placements: Any, dtype: str | None = None) -> DTensor:
        made = distribute_tensor(self.tensor(x, dtype), self.mesh, list(placements))
        return made if dtype else made.requires_grad_()

    def own(self, x: Any) -> Any:
        n, world = x.shape[0], self.world
        start = chunk_offset(n, world.size, world.rank)
        return x[start : start + chunk_size(n, world.size, world.rank)]

    def options(self, head: Head) -> dict[str, Any]:
        loss = head.loss
        weight = None if loss.weight is None else self.tensor(loss.weight)
        return {"weight": weight, "reduction": loss.reduction, "label_smoothing": loss.label_smoothing}

    def check_plain(self, head: Head, what: str, chunk: int | None = None) -> None:
        """Each rank with the rows of its own classes."""
        platform = self.platform
        parts = [head.x, self.own(head.weight), None if head.bias is None else self.own(head.bias)]
        leaves = [None if part is None else self.leaf(part) for part in parts]
        found = linear_cross_entropy(
            leaves[0],
            leaves[1],
            self.tensor(head.target, "int64"),
            linear_bias=leaves[2],
            chunk_size=chunk,
            num_classes=head.weight.shape[0],
            mesh=self.mesh,
            **self.options(head),
        )
        seed = numbers(*head.target.shape, seed=5) if head.loss.reduction == "none" else None
        platform.backward([found], None if seed is None else [self.tensor(seed)])
        value, gradients = head.expected(seed)
        check_near(found, value, name=f"{what}: loss", atol=self.atol)
        wanted = [gradients[0], self.own(gradients[1]), self.own(gradients[2])]
        for name, leaf, gradient in zip(("input", "weight", "bias"), leaves, wanted, strict=True):
            if leaf is not None:
                check_near(
                    platform.get_grad(leaf), gradient, name=f"{what}: gradient of {name}", atol=self.atol
                )

    def check_dtensors(self, head: Head, what: str, of_x: Sequence[Any], of_weight: Sequence[Any]) -> Any:
        """Input and layer as DTensors; the result."""
        x, weight = self.dtensor(head.x, *of_x), self.dtensor(head.weight, *of_weight)
        bias = None if head.bias is None else self.dtensor(head.bias, *of_weight)
        found = linear_cross_entropy(
            x, weight, self.tensor(head.target, "int64"), linear_bias=bias, chunk_size=3, **self.options(head)
        )
        seed = numbers(*head.target.shape, seed=5) if head.loss.reduction == "none" else None
        if seed is None:
            found.backward()
        else:
            (found * self.tensor(seed)).sum().backward()
        value, gradients = head.expected(seed)
        check_near(found.full_tensor(), value, name=f"{what}: loss", atol=self.atol)
        for name, leaf, gradient in zip(
            ("input", "weight", "bias"), (x, weight, bias), gradients, strict=True
        ):
            if leaf is not None:
                assert leaf.grad.placements == leaf.placements, f"{what}: {name}"
                check_near(
                    leaf.grad.full_tensor(), gradient, name=f"{what}: gradient of {name}", atol=self.atol
                )
        return found


@distributed((1, 2, 3, 4))
def test_every_reduction_weight_and_smoothing_is_that_of_layer_and_loss(world: World) -> None:
    heads, weights = Heads(world), np.abs(numbers(50, seed=2)) + 0.1
    # The formula of rows is that of the plain loss, whose tests try all combinations.
    kinds = (("some", None, 0.0), ("some", weights, 0.1), ("all", weights, 0.0))
    for reduction, (ignored, weight, smoothing) in itertools.product(("none", "mean", "sum"), kinds):
        head = Head.of(
            (6,), 50, ignored=ignored, weight=weight, reduction=reduction, label_smoothing=smoothing
        )
        what = f"{reduction}, ignored {ignored}, weights {weight is not None}, smoothing {smoothing}"
        heads.check_plain(head, what, 20)


@distributed((1, 2, 4))
def test_chunks_of_any_size_and_vocabularies_that_do_not_divide_are_exact(world: World) -> None:
    heads = Heads(world)
    for num_classes, chunk, has_bias in itertools.product((1, 3, 7), (2, 100, None), (False, True)):
        options = {"weight": np.arange(1.0, num_classes + 1), "label_smoothing": 0.2}
        head = Head.of((2, 3), num_classes, has_bias=has_bias, **options)
        heads.check_plain(head, f"{num_classes} classes, chunks of {chunk}, bias {has_bias}", chunk)


@distributed(2)
def test_inputs_of_any_rank_and_without_rows_are_taken(world: World) -> None:
    heads = Heads(world)
    for shape, reduction in itertools.product(((), (1,), (2, 1, 3), (0,), (2, 0)), ("none", "sum")):
        heads.check_plain(Head.of(shape, 5, reduction=reduction), f"{shape}, {reduction}", 2)


@distributed((1, 2, 4))
def test_a_head_that_is_a_dtensor_says_itself_how_classes_are_cut(world: World) -> None:
    heads = Heads(world)
    for num_classes, reduction in itertools.product((3, 7), ("none", "mean")):
        for of_x, of_weight in itertools.product(
            (Replicate(), Shard(1), Shard(-1)), (Shard(0), Replicate(), Shard(1))
        ):
            what = f"{num_classes} classes, {reduction}, input {of_x}, weight {of_weight}"
            has_bias = of_weight != Shard(1)  # a bias has one dim
            head = Head.of((2, 6), num_classes, has_bias=has_bias, reduction=reduction, label_smoothing=0.1)
            found = heads.check_dtensors(head, what, [of_x], [of_weight])
            if of_weight == Shard(0):
                assert found.placements == (Replicate(),)


@distributed(4)
def test_rows_may_be_cut_over_another_mesh_dim(world: World) -> None:
    heads = Heads(world, (2, world.size // 2))
    for reduction, rows in itertools.product(("none", "mean", "sum"), (3, 1)):
        head = Head.of((rows, 2), 7, reduction=reduction, weight=np.arange(1.0, 8))
        for of_x in ((Shard(0), Replicate()), (Shard(0), Shard(1)), (Replicate(), Shard(0))):
            heads.check_dtensors(head, f"{reduction}, input {of_x}", of_x, (Replicate(), Shard(0)))
        # Joined along the first mesh dim only, behind which the second one cuts.
        of_x, of_weight = (Shard(0), Shard(0)), (Shard(0), Replicate())
        heads.check_dtensors(head, f"{reduction}, input {of_x}, first dim", of_x, of_weight)


@distributed(2)
def test_a_plain_input_beside_a_cut_head_gives_a_plain_loss(world: World) -> None:
    heads, platform = Heads(world), world.platform
    head = Head.of((6,), 7)
    x, weight, bias = (
        heads.leaf(head.x),
        heads.dtensor(head.weight, Shard(0)),
        heads.dtensor(head.bias, Shard(0)),
    )
    loss = linear_cross_entropy(x, weight, heads.tensor(head.target, "int64"), linear_bias=bias)
    assert not isinstance(loss, DTensor)
    platform.backward([loss])
    value, gradients = head.expected(None)
    check_near(loss, value, name="loss", atol=heads.atol)
    check_near(platform.get_grad(x), gradients[0], name="input", atol=heads.atol)
    check_near(weight.grad.full_tensor(), gradients[1], name="weight", atol=heads.atol)


@distributed((2, 4))
def test_two_small_all_reduces_and_one_of_the_input_whatever_the_chunks(world: World) -> None:
    heads, platform = Heads(world), world.platform
    itemsize, head = platform.itemsize(heads.dtype), Head.of((2, 4), 50, has_bias=False)
    target = heads.tensor(head.target, "int64")
    of_rows = itemsize * 8 * 3
    for chunk in (1, 5, None):
        x, weight = heads.leaf(head.x), heads.leaf(heads.own(head.weight))
        with count_collectives() as counted:
            loss = linear_cross_entropy(
                x, weight, target, num_classes=50, group=world.group, chunk_size=chunk
            )
        counted.assert_counts(all_reduce=2)
        assert counted.nbytes() == of_rows
        with count_collectives() as counted:
            platform.backward([loss])
        counted.assert_counts(all_reduce=1)
        assert counted.nbytes() == itemsize * head.x.size
    sequence, cut = heads.dtensor(head.x, Shard(1)), heads.dtensor(head.weight, Shard(0))
    with count_collectives() as counted:
        loss = linear_cross_entropy(sequence, cut, target)
    counted.assert_counts(all_gather=1, all_reduce=2)
    with count_collectives() as counted:
        loss.backward()
    counted.assert_counts(reduce_scatter=1)


@distributed(2)
def test_only_what_needs_a_gradient_gets_one(world: World) -> None:
    heads, platform, head = Heads(world), world.platform, Head.of((6,), 7)
    _, gradients = head.expected(None)
    wanted = [gradients[0], heads.own(gradients[1]), heads.own(gradients[2])]
    for needed in itertools.product((True, False), repeat=3):
        if not any(needed):
            continue
        parts = (head.x, heads.own(head.weight), heads.own(head.bias))
        x, weight, bias = [
            platform.set_requires_grad_(heads.tensor(part), flag)
            for part, flag in zip(parts, needed, strict=True)
        ]
        loss = linear_cross_entropy(
            x, weight, heads.tensor(head.target, "int64"), linear_bias=bias, num_classes=7, mesh=heads.mesh
        )
        with count_collectives() as counted:
            platform.backward([loss])
        counted.assert_counts(all_reduce=int(needed[0]))
        for leaf, flag, gradient in zip((x, weight, bias), needed, wanted, strict=True):
            if flag:
                check_near(platform.get_grad(leaf), gradient, name=f"{needed}", atol=heads.atol)
            else:
                assert platform.get_grad(leaf) is None
