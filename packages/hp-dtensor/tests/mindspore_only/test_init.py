"""MindSpore's cells that are built without memory, sharded and initialised in pieces, against the same cells in one process."""

import importlib
import math
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn
from mindspore.common.initializer import initializer
from mindspore.utils import MsDispatchMode

from hp_dtensor import (
    Replicate,
    Shard,
    ShardingPlan,
    distribute_module,
    distribute_tensor,
    init_empty_weights,
    init_on_device,
    init_parameters,
    random,
    shard_module,
)
from hp_platform import get_platform, init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

R, S0, S1 = Replicate(), Shard(0), Shard(1)


class Scale(nn.Cell):
    """A cell with a method of its own, which draws its values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = Parameter(Tensor(np.empty(width, np.float32)), name="scale")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Like others do, when it is built and again later."""
        random.uniform_(self.scale, 0.5, 1.5)


class Model(nn.Cell):
    """Stock cells of both kinds, one of our own, and a weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.up = nn.Dense(6, 17)
        self.norm = nn.LayerNorm((17,))
        self.scale = Scale(17)
        self.batch_norm = mint.nn.BatchNorm1d(17)
        self.down = mint.nn.Linear(17, 6, bias=False)
        self.head = nn.Dense(6, 7, has_bias=False)
        self.head.weight = self.embedding.embedding_table


def _by_hand(model: Any, mesh: Any, first: Any, second: Any) -> None:
    """Every parameter becomes a DTensor where it stands; shared ones stay shared."""
    platform, known = get_platform(), {}
    for _, cell in platform.named_modules(model):
        for name, parameter in list(platform.named_parameters(cell, recurse=False, remove_duplicate=False)):
            if id(parameter) not in known:
                place = [second if parameter.ndim > 1 else first if parameter.ndim == 1 else R]
                known[id(parameter)] = Parameter(
                    distribute_tensor(parameter, mesh, place), requires_grad=parameter.requires_grad
                )
            platform.set_parameter(cell, name, known[id(parameter)])


def _by_a_plan(model: Any, mesh: Any, first: Any, second: Any) -> None:
    parameters = dict(get_platform().named_parameters(model))
    plan = {name: (second if x.ndim > 1 else first,) for name, x in parameters.items() if x.ndim}
    shard_module(model, mesh, ShardingPlan(plan=plan))


def _by_a_function(model: Any, mesh: Any, first: Any, second: Any) -> None:
    distribute_module(model, mesh)


def _named(model: Any) -> dict[str, Any]:
    platform = get_platform()
    return {**dict(platform.named_parameters(model)), **dict(platform.named_buffers(model))}


def _whole(seed: int, stage_index: int = 0) -> dict[str, Any]:
    random.manual_seed(seed)
    with init_empty_weights(include_buffers=True):
        model = Model()
    return _named(init_parameters(model, stage_index))


class _Results(MsDispatchMode):
    def __init__(self, note: Callable[[Any], None]) -> None:
        super().__init__()
        self._note = note

    def __ms_dispatch__(self, func: Any, args: Any, kwargs: Any = None) -> Any:
        result = func(*args)
        for x in result if isinstance(result, (tuple, list)) else (result,):
            self._note(x)
        return result


@contextmanager
def _sizes() -> Iterator[list[int]]:
    """How many elements the tensors with memory have that are made: by operations, empty, from arrays, by initializers."""
    sizes = [0]

    def note(x: Any) -> None:
        if isinstance(x, Tensor) and not x.is_meta and not x.has_init:
            sizes.append(math.prod(x.shape))

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            note(result)
            return result

        return call

    tensors: Any = importlib.import_module(
        "mindspore.common.tensor"
    )  # a function hides it from attribute access
    made = tensors._init

    def init(input_data: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(input_data, np.ndarray):
            sizes.append(input_data.size)
        return made(input_data, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, _Results(note):
        patch.setattr(mint, "empty", noting(mint.empty))
        patch.setattr(Tensor, "init_data", noting(Tensor.init_data))
        patch.setattr(tensors, "_init", init)
        yield sizes


@distributed(world_size=(1, 2), backends="mindspore")
def test_values_are_those_of_one_process_and_no_rank_makes_more_than_its_piece(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    expected = _whole(3)
    ways = [(_by_hand, S0, S0), (_by_hand, R, S1), (_by_a_plan, S0, S0), (_by_a_plan, S0, S1)]
    for shard, first, second in [*ways, (_by_a_function, R, R)]:
        random.manual_seed(3)
        with _sizes() as sizes, init_empty_weights(include_buffers=True):
            model = Model()
        assert max(sizes) <= 17, "vectors that BatchNorm and Scale make themselves"
        shard(model, mesh, first, second)
        identities = {name: id(x) for name, x in _named(model).items()}
        with _sizes() as sizes, count_collectives() as counted:
            assert init_parameters(model) is model
        counted.assert_counts()
        assert max(sizes) <= (9 * 6 if second != R and world.size == 2 else 17 * 6)
        assert {name: id(x) for name, x in _named(model).items()} == identities
        assert model.head.weight is model.embedding.embedding_table
        for name, value in _named(model).items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            assert_parity(full, expected[name], exact=True, name=f"{name} by {shard.__name__}, {second}")
            assert not value.has_init
        assert all(p.requires_grad and world.platform.is_leaf(p) for p in model.trainable_params())


@distributed(world_size=1, backends="mindspore")
def test_nothing_large_is_made_while_a_model_is_built(world: World) -> None:
    with init_empty_weights():
        Model()  # what is imported and made once
    tracemalloc.start()  # numpy, in which MindSpore's initializers work, tells it what it takes
    with init_empty_weights():
        model = nn.SequentialCell(nn.Dense(1500, 1000), nn.Embedding(1000, 500), mint.nn.Linear(800, 900))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000, "the smallest weight takes 2 MB"
    assert all(p.is_meta for p in model.get_parameters())


@distributed(world_size=1, backends="mindspore")
def test_what_nobody_initialises_is_named_and_nothing_is_changed(world: World) -> None:
    class Bare(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Dense(2, 2)
            self.gate = Parameter(Tensor(np.zeros(3, np.float32)), name="gate")

    def build() -> Any:
        with init_empty_weights():
            return nn.SequentialCell(Bare(), nn.Dense(2, 2))

    model = build()
    with pytest.raises(RuntimeError, match=r"nobody initialises 0\.gate:.*initializers="):
        init_parameters(model)
    assert all(p.is_meta for p in model.get_parameters())
    with pytest.raises(ValueError, match=r"no deferred tensor of this name; did you mean '0\.gate'"):
        init_parameters(model, initializers={"0.gat": random.normal_})
    with pytest.raises(ValueError, match="must be a function that writes the tensor, got 3"):
        init_parameters(model, initializers={"0.gate": 3})
    with pytest.raises(RuntimeError, match=r"own 0\.gate, or the function given"):
        init_parameters(model, initializers={"0.gate": lambda x: x})
    model = build()
    init_parameters(model, initializers={"0.gate": lambda x: get_platform().fill_(x, 4.0)})
    assert model[0].gate.asnumpy().tolist() == [4.0] * 3


@distributed(world_size=1, backends="mindspore")
def test_stages_differ_and_the_stream_goes_on_with_its_seed(world: World) -> None:
    first, second, again = _whole(3), _whole(3, stage_index=1), _whole(4)
    assert not np.array_equal(first["up.weight"].asnumpy(), second["up.weight"].asnumpy())
    assert_parity(
        second["up.weight"], again["up.weight"], exact=True, name="stage 1 of seed 3 draws as seed 4"
    )
    # embedding, two of up, scale, down
    assert random.get_state() == {"seed": 4, "number": 5}


class WithBuffer(nn.Cell):
    """A parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(initializer("ones", (3,)), name="weight")
        self.register_buffer("count", Tensor(np.full(3, 2.0, np.float32)))


@distributed(world_size=1, backends="mindspore")
def test_buffers_stay_real_unless_they_are_included(world: World) -> None:
    with init_empty_weights():
        cell = WithBuffer()
    assert cell.weight.is_meta and not cell.count.is_meta
    init_parameters(cell)
    assert cell.count.asnumpy().tolist() == [2.0] * 3, "what had values keeps them"
    with init_empty_weights(include_buffers=True):
        cell = WithBuffer()
    assert cell.count.is_meta
    init_parameters(cell, initializers={"count": lambda x: get_platform().fill_(x, 5.0)})
    assert cell.count.asnumpy().tolist() == [5.0] * 3 and cell.weight.asnumpy().tolist() == [1.0] * 3


@distributed(world_size=1, backends="mindspore")
def test_blocks_may_be_nested_and_end_with_an_error(world: World) -> None:
    with init_empty_weights():
        with init_on_device("cpu"):
            inner = nn.Dense(2, 2)
        outer = nn.Dense(2, 2)
    assert not inner.weight.is_meta and outer.weight.is_meta
    assert np.abs(inner.weight.asnumpy()).max() > 0
    with pytest.raises(ZeroDivisionError), init_empty_weights(include_buffers=True):
        _ = 1 / 0
    after = nn.Dense(2, 2)
    assert not after.weight.is_meta and not after.weight.has_init, "the block is over"
    assert not WithBuffer().count.is_meta
    with pytest.raises(ValueError, match="unknown device 'moon'"), init_on_device("moon"):
        pass


class Net(nn.Cell):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Dense(6, 5)
        self.down = nn.Dense(5, 2)

    def construct(self, x: Any) -> Any:
        """The sum of squares."""
        y = self.down(mint.tanh(self.up(x)))
        return (y * y).sum()


@distributed(world_size=2, backends="mindspore")
def test_the_model_trains_afterwards(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    x = Tensor(np.random.RandomState(0).rand(3, 6).astype(np.float32))
    found = []
    for is_sharded in (False, True):
        random.manual_seed(1)
        with init_empty_weights():
            net = Net()
        if is_sharded:
            _by_a_plan(net, mesh, S0, S0)
        init_parameters(net)
        loss = net(distribute_tensor(x, mesh, [R]) if is_sharded else x)
        world.platform.backward([loss])
        found.append({name: world.platform.get_grad(p) for name, p in _named(net).items()})
    for name, grad in found[1].items():
        # float32 sums of a few products, in another order
        assert_parity(grad, found[0][name], rtol=1e-5, atol=1e-6, name=name)
