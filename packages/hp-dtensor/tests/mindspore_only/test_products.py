"""Products of MindSpore: what is composed on cpu, and MindSpore's functions and objects on DTensors."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from hp_dtensor import Shard, distribute_tensor
from hp_dtensor._mindspore.composed import products
from hp_dtensor._mindspore.composed.einsum import einsum
from hp_platform import get_platform, init_device_mesh
from hp_platform.testing import World, distributed

sys.path.extend((str(Path(__file__).parents[1]), str(Path(__file__).parent)))
from rule_cases import Cases, case, check, t
from spelled import check_call

F = mint.nn.functional
A, B = np.random.RandomState(0).randn(5, 3), np.random.RandomState(1).randn(3, 4)
AS, BS = np.random.RandomState(2).randn(2, 5, 3), np.random.RandomState(3).randn(2, 3, 4)
M, MS = np.random.RandomState(4).randn(5, 4), np.random.RandomState(5).randn(2, 5, 4)
V, W = np.random.RandomState(6).randn(5), np.random.RandomState(7).randn(3)
IDS = np.array([[2, 0, 1], [1, 1, 4]])

BY_NUMPY: dict[str, tuple[Callable[[], Any], Any]] = {
    "outer": (lambda: products.outer(Tensor(V), Tensor(W)), np.outer(V, W)),
    "addmm": (lambda: products.added(Tensor(M), Tensor(A), Tensor(B), 0.3, 0.7), 0.3 * M + 0.7 * A @ B),
    "addbmm": (
        lambda: products.addbmm(Tensor(M), Tensor(AS), Tensor(BS), 2, 0.1),
        2 * M + 0.1 * (AS @ BS).sum(0),
    ),
    "embedding": (lambda: products.embedding(Tensor(IDS), Tensor(A)), A[IDS]),
}


@distributed(world_size=1, backends="mindspore")
def test_what_is_composed_gives_the_values_of_numpy(world: World) -> None:
    for name, (compute, expected) in BY_NUMPY.items():
        found = world.platform.to_numpy(compute())
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12, err_msg=name)


EQUATIONS = {
    "ij,jk->ik": (A, B),
    "bij,bjk->bik": (AS, BS),
    "bij,bjk": (AS, BS),
    "...ij,jk->...ik": (AS, B),
    "i,j->ij": (V, W),
    "i,i": (V, V),
    "ij->ji": (A,),
    "ij->": (A,),
    "ii->i": (A[:3],),
    "ii": (A[:3],),
    "iij->ij": (AS[:, :2],),
    "ij,jk,lk->il": (A, B, M),
    "bij,i,j->b": (AS, V, W),
    "ij,ij->i": (A, A[:, :1]),
    "ij,kl->k": (A, B),
}


@distributed(world_size=1, backends="mindspore")
def test_einsum_gives_the_values_of_numpy(world: World) -> None:
    for equation, arrays in EQUATIONS.items():
        found = world.platform.to_numpy(einsum(equation, *map(Tensor, arrays)))
        np.testing.assert_allclose(
            found, np.einsum(equation, *arrays), rtol=1e-12, atol=1e-12, err_msg=equation
        )


CASES: Cases = {}
case(CASES, "einsum", einsum, "ij,jk->ik", t(5, 3), t(3, 4))
case(CASES, "einsum", einsum, "bij,bkj,k->bi", t(2, 5, 3), t(2, 1, 3), t(1))
case(CASES, "einsum", einsum, "...i,ji->...j", t(2, 1, 3), t(5, 3))
case(CASES, "einsum", einsum, "iij->j", t(3, 3, 5))
case(CASES, "outer", products.outer, t(5), t(3))
case(CASES, "addmm", products.added, t(5, 4), t(5, 3), t(3, 4), 0.3, 0.7)
case(CASES, "addmv", products.added, t(5), t(5, 3), t(3), 1, 0.7)
case(CASES, "baddbmm", products.added, t(2, 5, 4), t(2, 5, 3), t(2, 3, 4))
case(CASES, "addbmm", products.addbmm, t(5, 4), t(2, 5, 3), t(2, 3, 4), 2, 1)


# Sums of up to eight products in float64.
@pytest.mark.parametrize("name", CASES)
@distributed(world_size=1, backends="mindspore")
def test_product_gives_values_and_gradients_of_the_unsharded_one(name: str, world: World) -> None:
    check(CASES[name], samples=2, tolerance=1e-8)


def _matmul(x: Any, y: Any) -> Any:
    return get_platform().matmul(x, y)


def _of_channels(x: Any, b: Any) -> Any:
    return x + b.reshape((1, 5, 1))


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
    "MatMul": (ops.MatMul(), _matmul, (A, B)),
    "MatMul transposed": (
        ops.MatMul(True, True),
        lambda x, y: _matmul(x.t(), y.t()),
        (A.T.copy(), B.T.copy()),
    ),
    "BatchMatMul transposed": (
        ops.BatchMatMul(transpose_b=True),
        lambda x, y: _matmul(x, y.swapaxes(1, 2)),
        (AS, BS.transpose(0, 2, 1).copy()),
    ),
    "mint mm": (mint.mm, _matmul, (A, B)),
    "mint bmm": (mint.bmm, _matmul, (AS, BS)),
    "ops bmm": (ops.bmm, _matmul, (AS, BS)),
    "mint outer": (mint.outer, products.outer, (V, W)),
    "ops outer": (ops.outer, products.outer, (V, W)),
    "mint addmm": (mint.addmm, products.added, (M, A, B)),
    "mint addmv": (mint.addmv, products.added, (V, A, W)),
    "mint baddbmm": (mint.baddbmm, products.added, (MS, AS, BS)),
    "mint embedding": (F.embedding, products.embedding, (IDS, A)),
    "mint linear": (F.linear, lambda x, w, b: _matmul(x, w.t()) + b, (A, B.T.copy(), M[0])),
    "ops einsum": (lambda x, y: ops.einsum("ij,jk->ik", x, y), _matmul, (A, B)),
    "ops einsum of dims by number": (
        lambda x, y: ops.einsum(x, [0, 1], y, [1, 2], [2, 0]),
        lambda x, y: _matmul(x, y).t(),
        (A, B),
    ),
    "ops addn": (lambda *xs: ops.addn(xs), lambda x, y, z: x + y + z, (A, A[::-1].copy(), A)),
    "AddN of one": (lambda x: ops.AddN()([x]), lambda x: x, (A,)),
    "BiasAdd": (ops.BiasAdd(), lambda x, b: x + b, (A, W)),
    "BiasAdd of channels": (ops.BiasAdd(), _of_channels, (AS, V)),
}


@distributed(2, backends="mindspore")
def test_functions_of_mindspore_give_values_and_gradients_of_the_unsharded_tensors(world: World) -> None:
    for name, (call, expected, arrays) in CALLS.items():
        check_call(world, name, call, expected, [Tensor(array) for array in arrays])


@distributed(2, backends="mindspore")
def test_clipping_by_the_norm_of_all_gradients_takes_that_of_the_whole(world: World) -> None:
    def clipped(x: Any, y: Any) -> Any:
        return ops.clip_by_global_norm([x, y], 0.5)

    # MindSpore computes it in float32: roundings of numbers below 1.
    check_call(world, "clip_by_global_norm", clipped, clipped, [Tensor(A), Tensor(B)], tolerance=1e-6)


@distributed(2, backends="mindspore")
def test_a_dense_layer_with_parameters_that_are_dtensors_is_that_of_the_whole(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    layer = nn.Dense(3, 4)
    weight, bias, x = (Tensor(a.astype(np.float32)) for a in (B.T.copy(), M[0], A))
    for name, value in (("weight", weight), ("bias", bias)):
        piece = distribute_tensor(value, mesh, [Shard(0)])
        world.platform.set_parameter(layer, name, world.platform.parameter(piece))
    y = layer(distribute_tensor(x, mesh, [Shard(0)]))
    expected = A.astype(np.float32) @ B.astype(np.float32) + M[0].astype(np.float32)
    # Sums of four numbers below 10 in float32.
    np.testing.assert_allclose(world.platform.to_numpy(y.full_tensor()), expected, rtol=0, atol=1e-5)


@distributed(1, backends="mindspore")
def test_padding_of_an_embedding_has_no_kernel_on_cpu(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (1,))
    ids, weight = (distribute_tensor(Tensor(a), mesh, [Shard(0)]) for a in (IDS, A))
    with pytest.raises(NotImplementedError, match=r"mindspore .*on cpu: embedding .*leave them out"):
        F.embedding(ids, weight, padding_idx=1)


@distributed(1, backends="mindspore")
def test_einsum_of_mint_is_refused_on_cpu_by_the_name_of_the_device_that_has_it(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (1,))
    x, y = (distribute_tensor(Tensor(a), mesh, [Shard(0)]) for a in (A, B))
    with pytest.raises(NotImplementedError, match="einsum only supports Ascend"):
        mint.einsum("ij,jk->ik", x, y)
