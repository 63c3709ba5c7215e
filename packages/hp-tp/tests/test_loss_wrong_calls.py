"""Losses called wrongly: refused at once, on all ranks alike, with what was given, what was expected and what to change."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, count_collectives, distributed
from hp_tp import linear_cross_entropy, loss_parallel, vocab_parallel_cross_entropy

sys.path.insert(0, str(Path(__file__).parent))
from loss_oracle import numbers


class Place:
    """What calls are made of: 4 rows, 3 features, 5 classes cut over 2 ranks into 3 and 2."""

    def __init__(self, world: World) -> None:
        self.world, self.platform = world, world.platform
        self.mesh = init_device_mesh(world.device_type, (2,), mesh_dim_names=("tp",))
        self.grid = init_device_mesh(world.device_type, (2, 1), mesh_dim_names=("dp", "tp"))
        self.own = 3 - world.rank
        self.target = self.tensor(np.array([0, 4, 2, 1]), "int64")
        self.logits = self.tensor(numbers(4, self.own))
        self.x, self.head = self.tensor(numbers(4, 3)), self.tensor(numbers(self.own, 3))
        self.options: dict[str, Any] = {"num_classes": 5, "mesh": self.mesh}

    def tensor(self, x: Any, dtype: str = "float32") -> Any:
        return self.platform.tensor(x, dtype, self.world.device)

    def cut(self, *placements: Any, shape: tuple[int, ...] = (4, 5), mesh: Any = None) -> DTensor:
        return distribute_tensor(self.tensor(numbers(*shape)), mesh or self.mesh, list(placements))

    def of_classes(self, logits: Any, *args: Any, **kwargs: Any) -> Any:
        """The rule of the block, by the function that both frameworks have."""
        return vocab_parallel_cross_entropy(logits, *args, **kwargs)

    def inside(self, logits: Any, target: Any, weight: Any = None, *, mesh: Any = None, **kwargs: Any) -> Any:
        """The framework's own function in a block."""
        if self.world.backend == "mindspore":
            from mindspore.mint.nn import functional
        else:
            from torch.nn import functional
        with loss_parallel(mesh=mesh):
            return functional.cross_entropy(logits, target, weight, **kwargs)


Call = Callable[[Place], Any]


def _local(change: Callable[[Place], dict[str, Any]]) -> Call:
    """``vocab_parallel_cross_entropy`` with some arguments changed."""

    def call(at: Place) -> Any:
        given = {"logits": at.logits, "target": at.target, **at.options, **change(at)}
        return vocab_parallel_cross_entropy(given.pop("logits"), given.pop("target"), **given)

    return call


def _fused(change: Callable[[Place], dict[str, Any]]) -> Call:
    """``linear_cross_entropy`` with some arguments changed."""

    def call(at: Place) -> Any:
        given = {"x": at.x, "head": at.head, "target": at.target, **at.options, **change(at)}
        return linear_cross_entropy(given.pop("x"), given.pop("head"), given.pop("target"), **given)

    return call


NO_RANKS = {"num_classes": None, "mesh": None}

WRONG: dict[str, tuple[Call, str]] = {
    "local: not floating": (
        _local(lambda at: {"logits": at.target}),
        "vocab_parallel_cross_entropy takes floating logits (n, classes, ...), got int64 of shape (4,)",
    ),
    "local: no tensor": (
        _local(lambda at: {"logits": [1.0]}),
        "takes floating logits (n, classes, ...), got list",
    ),
    "local: without num_classes": (
        _local(lambda at: {"num_classes": None}),
        "cuts classes over 2 ranks, which may have unequal numbers of them: give num_classes",
    ),
    "local: of another vocabulary": (
        _local(lambda at: {"num_classes": 9}),
        "classes on rank {rank} of 2, but of num_classes=9 it has {of_nine}: the ranks have [5, 4], as torch.chunk cuts",
    ),
    "local: mesh and group": (
        _local(lambda at: {"group": at.world.group}),
        "got mesh and group: give the one along which the classes are cut",
    ),
    "local: neither": (
        _local(lambda at: {"mesh": None}),
        "of num_classes=5 classes, but neither mesh nor group: give the mesh or group along which the classes are cut",
    ),
    "local: two mesh dims": (
        _local(lambda at: {"mesh": at.grid}),
        "cuts classes along one mesh dim, got {grid}: give that dim's mesh, such as mesh['tp']",
    ),
    "local: no mesh": (
        _local(lambda at: {"mesh": "tp"}),
        "mesh is a hp_platform.DeviceMesh of one dim, got str",
    ),
    "local: no group": (
        _local(lambda at: {"mesh": None, "group": [0, 1]}),
        "group is a hp_platform.ProcessGroup, got list",
    ),
    "local: target of another shape": (
        _local(lambda at: {"target": at.tensor([1, 2], "int64")}),
        "takes a target of shape (4,), got (2,)",
    ),
    "local: probabilities": (
        _local(lambda at: {"target": at.tensor(numbers(4))}),
        "takes class numbers, got a target of float32: probabilities are not built for classes that are cut; gather the logits",
    ),
    "local: target is a list": (
        _local(lambda at: {"target": [0, 4, 2, 1]}),
        "target is a tensor of class numbers, one per loss, got list",
    ),
    "local: weights of own classes": (
        _local(lambda at: {"weight": at.tensor(numbers(at.own))}),
        "weight is a tensor with one number for each of 5 classes, got shape ({own},)",
    ),
    "local: trained weights": (
        _local(lambda at: {"weight": at.platform.set_requires_grad_(at.tensor(numbers(5)), True)}),
        "is not differentiable with respect to its weight, but that requires a gradient: give weight.detach()",
    ),
    "local: reduction": (
        _local(lambda at: {"reduction": "batchmean"}),
        "reduction must be one of 'none', 'mean', 'sum', got 'batchmean'",
    ),
    "local: smoothing": (
        _local(lambda at: {"label_smoothing": 1.5}),
        "label_smoothing is a number from 0 to 1, got 1.5",
    ),
    "local: ignore_index": (
        _local(lambda at: {"ignore_index": None}),
        "ignore_index is a class number, got None",
    ),
    "a DTensor and a mesh": (
        _local(lambda at: {"logits": at.cut(Shard(1))}),
        "got logits that are a DTensor, which says itself how its classes are cut: leave num_classes, mesh and group out",
    ),
    "a DTensor that is whole": (
        lambda at: at.of_classes(at.cut(Replicate()), at.target),
        "loss_parallel: cross_entropy got logits that are not cut along their classes, dim 1 of (4, 5): (Replicate(),) of (4, 5) "
        "on mesh (2,). Let the last layer give Shard(-1)",
    ),
    "a DTensor cut by rows": (
        lambda at: at.of_classes(at.cut(Shard(0)), at.target),
        "not cut along their classes, dim 1 of (4, 5): (Shard(0),)",
    ),
    "a DTensor and probabilities": (
        lambda at: at.of_classes(at.cut(Shard(1)), at.tensor(numbers(4, 5))),
        "cross_entropy of scores (4, 5) inside of loss_parallel takes class numbers of shape (4,), got (4, 5): probabilities are "
        "not built for cut classes",
    ),
    "a DTensor and floats": (
        lambda at: at.of_classes(at.cut(Shard(1)), at.tensor(numbers(4))),
        "cross_entropy takes class numbers, got a target of float32",
    ),
    "a DTensor and weights of another length": (
        lambda at: at.of_classes(at.cut(Shard(1)), at.target, weight=at.tensor(numbers(4))),
        "the weight of cross_entropy has one number for each of 5 classes, got (Replicate(),) of (4,)",
    ),
    "block: no mesh": (
        lambda at: at.inside(at.cut(Shard(1)), at.target, mesh="tp"),
        "loss_parallel: mesh is a hp_platform.DeviceMesh, got str; make one with init_device_mesh, or leave it out",
    ),
    "fused: no tensor": (
        _fused(lambda at: {"head": None}),
        "linear_weight is a floating tensor, got NoneType",
    ),
    "fused: features": (
        _fused(lambda at: {"x": at.tensor(numbers(4, 2))}),
        "takes input (..., features) and linear_weight (classes, features), got shapes (4, 2) and ({own}, 3)",
    ),
    "fused: bias": (
        _fused(lambda at: {"linear_bias": at.tensor(numbers(5))}),
        "linear_bias has one number for each class of linear_weight ({own}, 3), got shape (5,)",
    ),
    "fused: dtypes": (
        _fused(lambda at: {"head": at.tensor(numbers(at.own, 3), "float16")}),
        "input is float32, linear_weight float16: cast one of them",
    ),
    "fused: chunk_size": (
        _fused(lambda at: {"chunk_size": 0}),
        "chunk_size is a number of classes of at least 1, or None for the default; got 0",
    ),
    "fused: target": (
        _fused(lambda at: {"target": at.tensor([[1]], "int64")}),
        "input of shape (4, 3) takes a target of shape (4,), got (1, 1)",
    ),
    "fused: plain layer": (
        _fused(lambda at: {"x": at.cut(Replicate(), shape=(4, 3)), **NO_RANKS}),
        "got linear_weight as a plain tensor beside DTensors: say how it lies, with distribute_tensor or DTensor.from_local",
    ),
    "fused: DTensors and a mesh": (
        _fused(lambda at: {"head": at.cut(Shard(0), shape=(5, 3))}),
        "got DTensors, which say themselves how classes are cut: leave num_classes, mesh and group out",
    ),
    "fused: plain input on a grid": (
        _fused(lambda at: {"head": at.cut(Replicate(), Shard(0), shape=(5, 3), mesh=at.grid), **NO_RANKS}),
        "it may be equal on all ranks, or cut along one of the 2 mesh dims: say which",
    ),
}


@distributed(2, timeout=120)
def test_every_wrong_call_is_refused_by_all_ranks_before_anything_is_sent(world: World) -> None:
    at = Place(world)
    for name, (call, message) in WRONG.items():
        filled = (
            message.replace("{rank}", str(world.rank))
            .replace("{own}", str(at.own))
            .replace("{of_nine}", str(5 - world.rank))
            .replace("{grid}", str(at.grid))
        )
        with count_collectives() as counted, pytest.raises(ValueError, match=re.escape(filled)) as caught:
            call(at)
        # Cutting the operands may have sent something; the loss itself did not.
        assert "all_reduce" not in counted.counts, f"{name}: {counted.record}"
        assert len(str(caught.value)) < 600, f"{name}: {caught.value}"


@distributed(2, backends=("torch", "cuda", "npu"))
def test_a_strict_block_takes_logits_of_its_mesh_alone(world: World) -> None:
    at = Place(world)
    on_grid = at.cut(Replicate(), Shard(1), mesh=at.grid)
    with pytest.raises(
        ValueError,
        match=r"on a mesh of 2 dims, one of which cuts the classes: give that mesh, loss_parallel\(mesh",
    ):
        at.inside(on_grid, at.target)
    with pytest.raises(
        ValueError, match=r"got logits on .*: give that mesh, or strict=False to take logits of any mesh"
    ):
        at.inside(on_grid, at.target, mesh=at.mesh)
    with pytest.raises(ValueError, match="label_smoothing is a number from 0 to 1, got 2"):
        at.inside(at.cut(Shard(1)), at.target, label_smoothing=2)
    with pytest.raises(ValueError, match="cross_entropy is not differentiable with respect to its weight"):
        at.inside(at.cut(Shard(1)), at.target, at.cut(Replicate(), shape=(5,)).requires_grad_())
    assert tuple(at.inside(on_grid, at.target, mesh=at.grid).shape) == ()


@distributed(2, backends="torch")
def test_a_target_that_is_no_class_is_refused_by_every_rank(world: World) -> None:
    at = Place(world)
    beyond = at.tensor([0, 5, 2, 1], "int64")  # no rank has class 5
    for call in (
        lambda: vocab_parallel_cross_entropy(at.logits, beyond, **at.options),
        lambda: linear_cross_entropy(at.x, at.head, beyond, **at.options),
        lambda: at.inside(at.cut(Shard(1)), beyond),
    ):
        with pytest.raises(RuntimeError, match="index 5 is out of bounds"):
            call()
