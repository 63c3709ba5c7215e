"""DTensors as parameters of MindSpore's cells, their copies and files, and how MindSpore's own optimizers move them."""

import copy
import pickle
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import nn

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, assert_parity, distributed


def _mesh(world: World) -> DeviceMesh:
    return init_device_mesh(world.device_type, (world.size,))


def _whole(*shape: int) -> Any:
    return mindspore.Tensor(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))


class Scale(nn.Cell):
    """One weight."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = mindspore.Parameter(weight, name="weight")

    def construct(self, x: Any) -> Any:
        """The sum of the product."""
        return (x * self.weight).sum()


@distributed(2, backends=["mindspore"])
def test_a_parameter_is_both_a_parameter_and_a_dtensor(world: World) -> None:
    mesh = _mesh(world)
    cell = Scale(distribute_tensor(_whole(3, 2), mesh, [Shard(0)]))
    (weight,) = cell.trainable_params()
    assert isinstance(weight, mindspore.Parameter) and isinstance(weight, DTensor)
    assert (weight.name, weight.shape, weight.requires_grad) == ("weight", (3, 2), True)
    cell(distribute_tensor(_whole(3, 2), mesh, [Replicate()])).backward()
    assert weight.grad is weight.grad and weight.grad.placements == (Shard(0),)
    assert_parity(weight.grad, _whole(3, 2), exact=True)
    with world.platform.no_grad():
        weight.copy_(_whole(3, 2) * 2)
    assert_parity(weight, _whole(3, 2) * 2, exact=True)


@distributed(2, backends=["mindspore"])
def test_the_platforms_backward_starts_from_dtensors(world: World) -> None:
    cell = Scale(distribute_tensor(_whole(3, 2), _mesh(world), [Shard(0)]))
    loss = cell(distribute_tensor(_whole(3, 2), _mesh(world), [Shard(0)]))
    world.platform.backward([loss])
    assert_parity(cell.weight.grad, _whole(3, 2), exact=True)
    assert world.platform.get_grad(cell.weight) is cell.weight.grad
    world.platform.set_grad(cell.weight, None)
    assert cell.weight.grad is None and world.platform.get_grad(cell.weight.to_local()) is None


@distributed(2, backends=["mindspore"])
def test_the_platform_makes_the_same_parameters(world: World) -> None:
    p, piece = world.platform, distribute_tensor(_whole(3, 2), _mesh(world), [Shard(0)])
    made = p.parameter(piece, requires_grad=False)
    again = p.parameter(made)
    for x, wants_grad in ((made, False), (again, True)):
        assert p.is_parameter(x) and isinstance(x, DTensor) and x._spec is piece._spec
        assert (x.requires_grad, x.is_leaf) == (wants_grad, True)
        # The same memory, as of plain tensors.
        assert x.to_local().data_ptr() == piece.to_local().data_ptr()
    meta = DTensor.from_local(p.empty((2, 2), "float32", "meta"), _mesh(world), [Shard(0)], shape=(4, 2))
    empty = p.parameter(meta)
    assert isinstance(empty, DTensor) and empty.shape == (4, 2) and empty.to_local().is_meta


@distributed(2, backends=["mindspore"])
def test_the_platform_asks_the_dtensor_and_not_its_wrapper_about_gradients(world: World) -> None:
    p, piece = world.platform, distribute_tensor(_whole(3, 2), _mesh(world), [Shard(0)])
    assert not p.requires_grad(piece) and p.is_leaf(piece)
    for wanted in (True, False):
        for made in (
            p.parameter(piece, requires_grad=wanted),
            mindspore.Parameter(piece, requires_grad=wanted),
            p.set_requires_grad_(p.parameter(piece, requires_grad=not wanted), wanted),
        ):
            assert p.is_leaf(made)
            assert p.requires_grad(made) is p.requires_grad(made.to_local()) is made.requires_grad is wanted
    leaf = distribute_tensor(_whole(3, 2), _mesh(world), [Shard(0)]).requires_grad_()
    product, seen = leaf * 2, []
    assert p.requires_grad(leaf) and p.is_leaf(leaf)
    assert p.requires_grad(product) and not p.is_leaf(product)
    with pytest.raises(RuntimeError, match="an operation made"):
        p.set_requires_grad_(product, False)
    p.register_tensor_hook(leaf, lambda g: seen.append(("hook", g.placements)))
    p.register_post_accumulate_grad_hook(leaf, lambda x: seen.append(("after", x is leaf, x.grad.placements)))
    p.backward([product.sum()])
    assert seen == [("hook", (Shard(0),)), ("after", True, (Shard(0),))]
    with p.no_grad():
        assert not p.requires_grad(p.reshape(leaf, (2, 3)))
    with pytest.raises(NotImplementedError, match="use backward and read the grad of its inputs"):
        p.grad([(leaf * 2).sum()], [leaf])


@distributed(2, backends=["mindspore"])
def test_copies_and_pickles(world: World) -> None:
    weight = mindspore.Parameter(distribute_tensor(_whole(3, 2), _mesh(world), [Shard(0)]), name="w")
    deep = copy.deepcopy(weight)
    assert isinstance(deep, mindspore.Parameter) and deep.name == "w" and deep._spec is weight._spec
    with world.platform.no_grad():
        deep.zero_()
    assert_parity(weight, _whole(3, 2), exact=True)
    again = pickle.loads(pickle.dumps(weight))
    assert isinstance(again, DTensor) and again._spec is weight._spec and again.requires_grad
    assert_parity(again, _whole(3, 2), exact=True)


@pytest.mark.parametrize("optimizer", [nn.SGD, nn.Adam])
@distributed(2, backends=["mindspore"])
def test_mindspores_optimizers_move_local_parameters(world: World, optimizer: Any) -> None:
    mesh, whole = _mesh(world), _whole(4, 2)
    piece = whole[2 * world.rank : 2 * world.rank + 2]
    moved = []
    for value, wrap in ((whole, None), (piece, [Shard(0)])):
        local = mindspore.Parameter(mindspore.Tensor(value.asnumpy()), name="w")
        x = local if wrap is None else DTensor.from_local(local, mesh, wrap)
        y = (x * x).sum()
        world.platform.backward([y])
        grad = world.platform.get_grad(local)
        optimizer([local], learning_rate=0.25)((grad,))
        moved.append(x)
    assert moved[1].to_local() is not moved[0]
    # The kernel may round once more or less where it takes several elements at a time.
    assert_parity(moved[1].detach(), mindspore.Tensor(moved[0].asnumpy()), rtol=2e-7)
