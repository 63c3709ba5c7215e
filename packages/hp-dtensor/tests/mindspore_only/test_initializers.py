"""Initializers of MindSpore and of stock cells: draws of the same distributions, or a refusal."""

import math
from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn
from mindspore.common import initializer as stock
from mindspore.common.initializer import initializer

from hp_dtensor import (
    Replicate,
    Shard,
    ShardingPlan,
    init_empty_weights,
    init_parameters,
    random,
    shard_module,
)
from hp_platform import get_platform, init_device_mesh
from hp_platform.testing import World, assert_parity, distributed

R, S0, S1 = Replicate(), Shard(0), Shard(1)


INITIALIZERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "zeros": ("zeros", lambda x: x),
    "ones": ("ones", lambda x: get_platform().fill_(x, 1)),
    "a number": (0.25, lambda x: get_platform().fill_(x, 0.25)),
    "Constant": (stock.Constant(-2), lambda x: get_platform().fill_(x, -2)),
    "Uniform": (stock.Uniform(0.3), lambda x: random.uniform_(x, -0.3, 0.3)),
    "Normal": (stock.Normal(0.3, 2.0), lambda x: random.normal_(x, 2.0, 0.3)),
    "TruncatedNormal": (
        stock.TruncatedNormal(0.5, 0.25, -0.5, 0.75),
        lambda x: random.trunc_normal_(x, 0.25, 0.5, -0.5, 0.75),
    ),
    "XavierUniform": (stock.XavierUniform(2.0), lambda x: random.xavier_uniform_(x, 2.0)),
    "XavierNormal": ("xavier_normal", random.xavier_normal_),
    "HeUniform": (
        stock.HeUniform(math.sqrt(5), "fan_out"),
        lambda x: random.kaiming_uniform_(x, math.sqrt(5), "fan_out"),
    ),
    "HeNormal": (
        stock.HeNormal(0.2, nonlinearity="relu"),
        lambda x: random.kaiming_normal_(x, nonlinearity="relu"),
    ),
    "HeNormal of a convolution": (
        stock.HeNormal(nonlinearity="conv2d"),
        lambda x: random.kaiming_normal_(x, nonlinearity="linear"),
    ),
}


class Weight(nn.Cell):
    """One parameter by an initializer."""

    def __init__(self, init: Any, shape: tuple[int, ...], dtype: Any = mindspore.float32) -> None:
        super().__init__()
        self.weight = Parameter(initializer(init, shape, dtype), name="weight")


@distributed(world_size=2, backends="mindspore")
def test_initializers_of_mindspore_are_draws_of_the_same_distributions(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    for name, (init, draw) in INITIALIZERS.items():
        for shape, dtype in (((31, 23, 5), mindspore.float32), ((3, 4), mindspore.float64)):
            random.manual_seed(5)
            expected = draw_into(draw, shape, dtype)
            random.manual_seed(5)
            with init_empty_weights():
                cell = Weight(init, shape, dtype)
            shard_module(cell, mesh, ShardingPlan(plan={"weight": (S1,)}))
            weight = init_parameters(cell).weight
            assert weight.placements == (S1,) and weight.dtype == dtype
            assert_parity(weight, expected, exact=True, name=name)
        # The moments of 3565 numbers differ by a few percent.
        own = draw_into(draw, (31, 23, 5), mindspore.float32).asnumpy()
        theirs = initializer(init, (31, 23, 5)).init_data().asnumpy()
        assert abs(own.std() - theirs.std()) <= 0.06 * theirs.std(), name
        assert abs(own.mean() - theirs.mean()) <= 0.1 * theirs.std(), name


def draw_into(draw: Callable[[Any], Any], shape: tuple[int, ...], dtype: Any) -> Tensor:
    """A plain tensor with the values of hp_dtensor.random."""
    x = get_platform().zeros(shape, dtype)
    draw(x)
    return x


@distributed(world_size=1, backends="mindspore")
def test_stock_cells_that_fill_a_parameter_with_one_number_get_it_again(world: World) -> None:
    for build in (lambda: mint.nn.LayerNorm(4), lambda: nn.PReLU(2, 0.125), lambda: mint.nn.GroupNorm(2, 4)):
        with init_empty_weights():
            cell = build()
        assert all(p.is_meta for p in cell.get_parameters())
        init_parameters(cell)
        for own, expected in zip(cell.get_parameters(), build().get_parameters(), strict=True):
            assert_parity(own, expected, exact=True)
    with init_empty_weights():
        drawn = nn.GRU(3, 4)
    with pytest.raises(RuntimeError, match="nobody initialises weight_ih_l0, weight_hh_l0"):
        init_parameters(drawn)


@distributed(world_size=1, backends="mindspore")
def test_other_initializers_are_refused_by_name_and_functions_are_taken(world: World) -> None:
    class Own(stock.Normal):
        """Who knows what it does."""

    for init in (stock.Orthogonal(), Own(), stock.Identity(), stock.Constant(np.ones(4, np.float32))):
        with init_empty_weights():
            model = nn.SequentialCell(nn.Dense(4, 4), Weight(init, (4, 4)))
        with pytest.raises(
            NotImplementedError, match=rf"{type(init).__name__} of Weight\.weight .*initializers="
        ):
            init_parameters(model)
        assert all(p.is_meta for p in model.get_parameters()), "nothing was changed"
        random.manual_seed(2)
        init_parameters(model, initializers={"1.weight": lambda x: random.uniform_(x, 1.0, 2.0)})
        random.manual_seed(2)
        model_alone = [random.kaiming_uniform_(mint.empty((4, 4)), math.sqrt(5))]
        random.uniform_(mint.empty((4,)), -0.5, 0.5)
        model_alone.append(random.uniform_(mint.empty((4, 4)), 1.0, 2.0))
        for own, expected in zip((model[0].weight, model[1].weight), model_alone, strict=True):
            assert_parity(own.value(), expected, exact=True)
