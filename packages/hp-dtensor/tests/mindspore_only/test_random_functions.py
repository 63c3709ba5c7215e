"""MindSpore's own functions that draw: on DTensors they have the values of hp_dtensor.random, for every sharding."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, dtype, mint, nn, ops

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor, random
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, distributed

F = mint.nn.functional
X = np.random.RandomState(0).rand(5, 3)

DROPPING: dict[str, Callable[[Any], Any]] = {
    "ops": lambda x: ops.dropout(x, 0.1),
    "mint": lambda x: F.dropout(x, 0.1),
    "nn": nn.Dropout(p=0.1).set_train(),
    "mint.nn": mint.nn.Dropout(0.1).set_train(),
}


@distributed(2, backends="mindspore")
def test_dropout_drops_what_the_unsharded_program_drops_forward_and_backward(world: World) -> None:
    platform, mesh = world.platform, init_device_mesh(world.device_type, (2,))
    leaf = platform.set_requires_grad_(Tensor(X), True)
    random.manual_seed(3)
    whole = random.dropout(leaf, 0.1)
    (gradient,) = platform.grad([whole], [leaf], [Tensor(X)])
    for name, drop in DROPPING.items():
        for place in (Shard(0), Shard(1), Replicate()):
            x = distribute_tensor(Tensor(X), mesh, [place]).requires_grad_(True)
            random.manual_seed(3)
            y = drop(x)
            (y * distribute_tensor(Tensor(X), mesh, [place])).sum().backward()
            assert y.placements == (place,)
            assert_parity(y.detach(), platform.detach(whole), exact=True, name=f"{name} of {place}")
            assert_parity(x.grad, gradient, exact=True, name=f"{name} of {place}: gradient")


@distributed(2, backends="mindspore")
def test_whole_channels_are_dropped_alike_on_all_ranks(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    images = Tensor(np.ones((3, 4, 2, 2)))
    found = []
    for drop in (lambda x: ops.dropout2d(x, 0.5), lambda x: F.dropout2d(x, 0.5)):
        for place in (Shard(0), Shard(1), Shard(2), Replicate()):
            random.manual_seed(5)
            found.append(drop(distribute_tensor(images, mesh, [place])).full_tensor())
    first = world.platform.to_numpy(found[0])
    assert set(first.reshape(12, 4).max(1)) == {0.0, 2.0} and (first.min((2, 3)) == first.max((2, 3))).all()
    for other in found[1:]:
        assert_parity(other, found[0], exact=True)


@distributed(2, backends="mindspore")
def test_tensors_like_another_are_the_same_for_every_sharding(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    calls: dict[str, Callable[[Any], Any]] = {
        "mint rand_like": mint.rand_like,
        "mint randn_like": lambda x: mint.randn_like(x, dtype=dtype.float32),
        "mint randint_like": lambda x: mint.randint_like(x, 2, 9),
        "mint bernoulli": mint.bernoulli,
        "ops bernoulli": lambda x: ops.bernoulli(x, 0.25),
        "ops rand_like": ops.rand_like,
        "ops randn_like": lambda x: ops.randn_like(x, dtype=dtype.float64),
        "ops randint_like": lambda x: ops.randint_like(x, 2, 9, dtype=dtype.int32),
    }
    for name, call in calls.items():
        found = []
        for place in (Replicate(), Shard(0), Shard(1)):
            random.manual_seed(7)
            y = call(distribute_tensor(Tensor(X), mesh, [place]))
            assert y.placements == (place,)
            found.append(y.full_tensor())
        for other in found[1:]:
            assert_parity(other, found[0], exact=True, name=name)
    x = distribute_tensor(Tensor(X), mesh, [Shard(0)])
    random.manual_seed(7)
    expected = random.rand(5, 3, dtype="float64")
    for call in (mint.rand_like, ops.rand_like):
        random.manual_seed(7)
        assert_parity(call(x), expected, exact=True)
    assert not isinstance(ops.rand_like(Tensor(X)), DTensor)
    with pytest.raises(ValueError, match="leave seed out"):
        ops.rand_like(x, 3)
    with pytest.raises(ValueError, match="must be one of ints, got Float64"):
        ops.randint_like(x, 2, 9)


@distributed(2, backends="mindspore")
def test_constants_like_another_lie_as_it_does(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    x = distribute_tensor(Tensor(X), mesh, [Shard(0)])
    calls: dict[str, tuple[Any, float]] = {
        "ops zeros_like": (ops.zeros_like(x), 0),
        "mint zeros_like": (mint.zeros_like(x), 0),
        "ops ones_like": (ops.ones_like(x), 1),
        "mint ones_like": (mint.ones_like(x), 1),
        "mint full_like": (mint.full_like(x, 2.5), 2.5),
        "ops full_like": (ops.full_like(x, 2.5), 2.5),
        "mint empty_like": (mint.empty_like(x) * 0, 0),
    }
    for name, (y, value) in calls.items():
        assert y.placements == (Shard(0),) and y.dtype == x.dtype, name
        if name != "mint empty_like":
            assert_parity(y, Tensor(np.full((5, 3), float(value))), exact=True, name=name)
    assert mint.zeros_like(x, dtype=dtype.int64).dtype == dtype.int64


SAMPLING: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "ops multinomial": (lambda x: ops.multinomial(x, 9), dtype.int32),
    "ops multinomial without replacement": (lambda x: ops.multinomial(x, 3, False), dtype.int32),
    "mint multinomial": (lambda x: mint.multinomial(x, 9, True), dtype.int64),
    "mint multinomial without replacement": (lambda x: mint.multinomial(x, 2), dtype.int64),
    "Tensor multinomial": (lambda x: x.multinomial(2, False), dtype.int32),
    "Multinomial": (lambda x: ops.Multinomial(dtype=dtype.int64)(x, 4), dtype.int64),
}


@distributed(2, backends="mindspore")
def test_categories_are_the_same_for_every_sharding(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    for name, (call, wanted) in SAMPLING.items():
        found = []
        for place in (Replicate(), Shard(0), Shard(1)):
            random.manual_seed(7)
            y = call(distribute_tensor(Tensor(X), mesh, [place]))
            assert y.placements == (place if place != Shard(1) else Replicate(),) and y.dtype == wanted, name
            found.append(y.full_tensor())
        for other in found[1:]:
            assert_parity(other, found[0], exact=True, name=name)
        random.manual_seed(7)
        one_row = call(distribute_tensor(Tensor(X[0]), mesh, [Shard(0)])).full_tensor()
        assert world.platform.to_numpy(one_row).shape == found[0].shape[1:], name


@distributed(2, backends="mindspore")
def test_categories_are_drawn_as_often_as_their_weights_say(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    weights = np.array([[1.0, 0.0, 3.0], [2.0, 2.0, 0.0], [0.0, 1.0, 0.0]])
    x = distribute_tensor(Tensor(weights), mesh, [Shard(0)])
    random.manual_seed(1)
    numbers = world.platform.to_numpy(ops.multinomial(x, 20_000).full_tensor())
    shares = np.stack([np.bincount(row, minlength=3) for row in numbers]) / 20_000
    # Five standard deviations of a share of 1/2.
    np.testing.assert_allclose(shares, weights / weights.sum(1, keepdims=True), rtol=0, atol=0.018)
    first = world.platform.to_numpy(ops.multinomial(x, 3, False).full_tensor())
    assert (np.sort(first, 1) == [0, 1, 2]).all() and set(first[:2, 2]) == {1, 2} and first[2, 0] == 1


@distributed(1, backends="mindspore")
def test_wrong_calls_of_multinomial_are_named(world: World) -> None:
    x = distribute_tensor(Tensor(X), init_device_mesh(world.device_type, (1,)), [Shard(0)])
    with pytest.raises(ValueError, match="cannot draw 4 of 3 categories without replacement"):
        ops.multinomial(x, 4, False)
    with pytest.raises(ValueError, match=r"got shape \(1, 5, 3\)"):
        mint.multinomial(x.unsqueeze(0), 1)
    with pytest.raises(ValueError, match="leave seed out"):
        ops.multinomial(x, 2, seed=3)


@distributed(1, backends="mindspore")
def test_dropout_in_place_is_refused(world: World) -> None:
    x = distribute_tensor(Tensor(X), init_device_mesh(world.device_type, (1,)), [Shard(0)])
    with pytest.raises(NotImplementedError, match="mindspore: .*use inplace=False"):
        F.dropout(x, 0.5, inplace=True)
