"""Orders, extremes, moments, norms and one-hot vectors by MindSpore's functions on DTensors; what is composed, against numpy."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, mint, ops

from hp_dtensor import Shard, distribute_tensor
from hp_dtensor._mindspore.composed import along
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed

sys.path.extend((str(Path(__file__).parents[1]), str(Path(__file__).parent)))
from spelled import check_call

F = mint.nn.functional
# All different, so that places and gradients are those of one element.
X = np.random.RandomState(0).permutation(15).reshape(5, 3) * 0.375 - 2.5
IDS = np.array([[2, 0], [1, 3], [3, 3]])
INFINITE = np.array([[1.0, -np.inf], [-np.inf, -np.inf]])

BY_NUMPY: dict[str, tuple[Callable[[], Any], Any]] = {
    "topk": (lambda: along.topk(Tensor(X), 2, 0)[0], -np.sort(-X, 0)[:2]),
    "sort": (lambda: along.sort(Tensor(X), 0, True)[1], np.argsort(-X, 0)),
    "argmax": (lambda: along.argmax(Tensor(X), 1, True), X.argmax(1)[:, None]),
    "argmin of all": (lambda: along.argmin(Tensor(X)), X.argmin()),
    "logsumexp": (lambda: along.logsumexp(Tensor(X), (0,)), np.log(np.exp(X).sum(0))),
    "logsumexp of infinities": (lambda: along.logsumexp(Tensor(INFINITE), 1), np.array([1.0, -np.inf])),
    "var": (lambda: along.moment(Tensor(X), None, 1, False, False), X.var(ddof=1)),
    "std": (lambda: along.moment(Tensor(X), 0, 0, True, True), X.std(0, keepdims=True)),
    **{
        f"norm of order {order}": (
            lambda order=order: along.vector_norm(Tensor(X), order, 0),
            np.linalg.norm(X, order, 0),
        )
        for order in (0, 1, 2, 3.5, float("inf"), float("-inf"))
    },
}


@distributed(world_size=1, backends="mindspore")
def test_what_is_composed_gives_the_values_of_numpy(world: World) -> None:
    for name, (compute, expected) in BY_NUMPY.items():
        found = world.platform.to_numpy(compute())
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12, err_msg=name)


def _one_hot(ids: Any) -> Any:
    return (mint.unsqueeze(ids, -1) == Tensor(np.arange(4))).astype("int64")


def _var(x: Any) -> Any:
    return along.moment(x, 0, 1, False, False)


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Any]] = {
    "mint topk": (lambda x: mint.topk(x, 2, 0)[0], lambda x: along.topk(x, 2, 0)[0], X),
    "mint topk, places": (lambda x: mint.topk(x, 2)[1], lambda x: along.topk(x, 2)[1], X),
    "ops topk": (lambda x: ops.topk(x, 2), lambda x: ops.topk(x, 2), X),
    "TopK": (lambda x: ops.TopK()(x, 2), lambda x: ops.topk(x, 2), X),
    "mint sort": (lambda x: mint.sort(x, dim=0), lambda x: along.sort(x, 0), X),
    "mint sort, descending": (
        lambda x: mint.sort(x, dim=1, descending=True),
        lambda x: along.sort(x, 1, True),
        X,
    ),
    "ops sort": (lambda x: ops.sort(x, 0), lambda x: ops.sort(x, 0), X),
    "mint argsort": (lambda x: mint.argsort(x, dim=0), lambda x: along.sort(x, 0)[1], X),
    "ops argsort": (lambda x: ops.argsort(x, 0, True), lambda x: ops.argsort(x, 0, True), X),
    "mint argmax": (lambda x: mint.argmax(x, 0, True), lambda x: along.argmax(x, 0, True), X),
    "mint argmax of all": (mint.argmax, along.argmax, X),
    "ops argmin": (lambda x: ops.argmin(x, 0), lambda x: ops.argmin(x, 0), X),
    "ArgMaxWithValue": (lambda x: ops.ArgMaxWithValue(0)(x), lambda x: ops.ArgMaxWithValue(0)(x), X),
    "ops min": (lambda x: ops.min(x, 1), lambda x: ops.min(x, 1), X),
    "mint cumsum": (lambda x: mint.cumsum(x, 0), lambda x: ops.cumsum(x, 0), X),
    "mint logsumexp": (lambda x: mint.logsumexp(x, 0), lambda x: along.logsumexp(x, 0), X),
    "mint var": (lambda x: mint.var(x, 0), _var, X),
    "ops std": (lambda x: ops.std(x, 0), lambda x: along.moment(x, 0, 0, False, True), X),
    "mint std": (lambda x: mint.std(x), lambda x: along.moment(x, None, 1, False, True), X),
    "mint norm": (lambda x: mint.norm(x, 3, 0), lambda x: along.vector_norm(x, 3, 0), X),
    "mint norm of all": (mint.norm, along.vector_norm, X),
    "mint median": (lambda x: mint.median(x, 0)[0], lambda x: ops.median(x, 0)[0], X),
    "ops median": (lambda x: ops.median(x, 1)[0], lambda x: ops.median(x, 1)[0], X),
    "mint one_hot": (lambda ids: F.one_hot(ids, 4), _one_hot, IDS),
    "mint one_hot of as many as there are": (F.one_hot, _one_hot, IDS),
    "ops one_hot": (
        lambda ids: ops.one_hot(ids, 4, Tensor(2.0), Tensor(1.0), 1),
        lambda ids: ops.one_hot(ids, 4, Tensor(2.0), Tensor(1.0), 1),
        IDS,
    ),
    "mint index_select": (
        lambda x: mint.index_select(x, 0, Tensor(IDS[0])),
        lambda x: ops.gather(x, Tensor(IDS[0]), 0),
        X,
    ),
}


@distributed(2, backends="mindspore")
def test_functions_of_mindspore_give_values_and_gradients_of_the_unsharded_tensors(world: World) -> None:
    for name, (call, expected, array) in CALLS.items():
        check_call(world, name, call, expected, [Tensor(array)])


@distributed(1, backends="mindspore")
def test_a_stable_order_has_no_kernel_on_cpu(world: World) -> None:
    x = distribute_tensor(Tensor(X), init_device_mesh(world.device_type, (1,)), [Shard(0)])
    with pytest.raises(
        NotImplementedError, match=r"mindspore .*on cpu: sort keeps no order .*leave stable out"
    ):
        mint.sort(x, stable=True)
