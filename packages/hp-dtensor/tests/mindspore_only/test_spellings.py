"""How MindSpore's primitives reach their rules: names, blocks that skip the dispatch, plain tensors beside DTensors."""

import numpy as np
from mindspore import Tensor, mint, ops

from hp_dtensor import DTensor, Shard, SkipDTensorDispatch, _names, check_spmd, distribute_tensor
from hp_dtensor._mindspore.spelling import SPELLINGS
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, distributed

F = mint.nn.functional
X = np.random.RandomState(0).randn(4, 3)


@distributed(1, backends="mindspore")
def test_every_spelling_stands_in_the_tables_under_its_rule(world: World) -> None:
    named = {name: rule for rule, name in _names.primitives()}
    # What only asks for the kind of a tensor has no rule; what samples categories works on the rows that a rank has.
    assert {name: s.rule for name, s in SPELLINGS.items() if named.get(name) != s.rule} == {
        "typeof": "typeof",
        "Multinomial": "multinomial",
        "MultinomialExt": "multinomial",
    }


@distributed(2, backends="mindspore")
def test_a_block_that_skips_dispatch_runs_spellings_on_local_tensors(world: World) -> None:
    x = distribute_tensor(Tensor(X), init_device_mesh(world.device_type, (2,)), [Shard(0)])
    with SkipDTensorDispatch():
        y = ops.group_norm(x.reshape((2, 3)), 3)
        values, places = ops.topk(x, 2)
    assert not isinstance(y, DTensor) and not isinstance(values, DTensor) and places.shape == (2, 2)
    with SkipDTensorDispatch(no_skip={"mse_loss"}):
        assert isinstance(F.mse_loss(x, x), DTensor)


@distributed(2, backends="mindspore")
def test_spellings_hold_what_they_declare(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    with check_spmd():
        x = distribute_tensor(Tensor(X), mesh, [Shard(0)]).requires_grad_(True)
        y = F.layer_norm(x, (3,))
        F.cross_entropy(y, distribute_tensor(Tensor([2, 0, 1, 1]), mesh, [Shard(0)])).backward()
    assert x.grad is not None and x.grad.placements == (Shard(0),)


@distributed(2, backends="mindspore")
def test_plain_weights_of_a_loss_count_as_replicated(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    target, weight = Tensor([2, 0, 1, 1]), Tensor(np.array([0.5, 2.0, 1.0]))
    x, t = (distribute_tensor(value, mesh, [Shard(0)]) for value in (Tensor(X), target))
    logs = X - np.log(np.exp(X).sum(1, keepdims=True))
    own = np.array([0.5, 2.0, 1.0])[[2, 0, 1, 1]]
    expected = -(logs[np.arange(4), [2, 0, 1, 1]] * own).sum() / own.sum()
    assert_parity(F.cross_entropy(x, t, weight), Tensor(expected), rtol=0, atol=1e-12)
