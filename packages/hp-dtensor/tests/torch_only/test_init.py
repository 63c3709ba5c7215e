"""Models that are built without memory, sharded and initialised in pieces, against the same model in one process."""

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hp_dtensor import (
    Replicate,
    Shard,
    distribute_tensor,
    init_empty_weights,
    init_on_device,
    init_parameters,
    random,
)
from hp_platform import init_device_mesh
from hp_platform.testing import World, count_collectives, distributed

TORCH = ("torch", "cuda")
R, S0, S1 = Replicate(), Shard(0), Shard(1)


class Scale(torch.nn.Module):
    """A module with a method of its own, which computes its values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.scale)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 6)
        self.up = torch.nn.Linear(6, 17)
        self.norm = torch.nn.LayerNorm(17)
        self.scale = Scale(17)
        self.batch_norm = torch.nn.BatchNorm1d(17)
        self.down = torch.nn.Linear(17, 6, bias=False)
        self.head = torch.nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight


def _shard(model: Any, mesh: Any, first: Any, second: Any) -> None:
    """Every parameter becomes a DTensor where it stands; shared ones stay shared."""
    known: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in known:
                placement = first if parameter.ndim == 1 else second
                placements = [placement if i == 0 else R for i in range(len(mesh.shape))]
                known[id(parameter)] = torch.nn.Parameter(distribute_tensor(parameter, mesh, placements))
            setattr(module, name, known[id(parameter)])


def _whole(seed: int, stage_index: int = 0) -> dict[str, torch.Tensor]:
    random.manual_seed(seed)
    with init_empty_weights(include_buffers=True):
        model = Model()
    return dict(init_parameters(model, stage_index).state_dict())


class Sizes(TorchDispatchMode):
    """How many elements the largest tensor with memory has that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        made = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor) and not x.is_meta]
        self.largest = max([self.largest, *made])
        return result


@distributed(world_size=(1, 2), backends=TORCH)
def test_values_are_those_of_one_process_and_no_rank_makes_more_than_its_piece(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    expected = _whole(3)
    for first, second in ((S0, S0), (R, S1), (S0, R)):
        random.manual_seed(3)
        sizes = Sizes()
        with sizes, init_empty_weights(include_buffers=True):
            model = Model()
        assert sizes.largest == 0
        _shard(model, mesh, first, second)
        identities = {name: id(x) for name, x in model.named_parameters()}
        with Sizes() as sizes, count_collectives() as counted:
            assert init_parameters(model) is model
        counted.assert_counts()
        if second != R and world.size == 2:
            assert sizes.largest <= 9 * 6, "a piece of the largest weight, 17 x 6"
        assert {name: id(x) for name, x in model.named_parameters()} == identities
        assert model.head.weight is model.embedding.weight
        for name, value in model.state_dict().items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            assert torch.equal(full.cpu(), expected[name].cpu()), f"{name} by {first}, {second}"
        assert all(p.requires_grad and p.is_leaf for p in model.parameters())


@distributed(world_size=1, backends=TORCH)
def test_values_are_those_of_a_model_that_is_built_among_global_draws(world: World) -> None:
    random.manual_seed(3)
    with random.global_draws():
        built = Model()
    # The head is drawn before it is tied, and what is tied keeps the embedding's values.
    expected = _whole(3)
    for name, value in built.state_dict().items():
        assert torch.equal(value, expected[name]), name


@distributed(world_size=1, backends=TORCH)
def test_stages_differ_and_the_stream_goes_on_with_its_seed(world: World) -> None:
    first, second, again = _whole(3), _whole(3, stage_index=1), _whole(4)
    assert not torch.equal(first["up.weight"], second["up.weight"])
    assert torch.equal(second["up.weight"], again["up.weight"]), "stage 1 of seed 3 draws as seed 4"
    state = random.get_state()
    assert state["seed"] == 4
    assert state["number"] == 5
    for wrong in (-1, 1.0, True):
        with pytest.raises(ValueError, match="stage_index"):
            init_parameters(torch.nn.Linear(2, 2), wrong)


@distributed(world_size=1, backends=TORCH)
def test_the_model_trains_afterwards(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (1,))
    with init_empty_weights():
        model = torch.nn.Linear(4, 3)
    _shard(model, mesh, S0, S0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    init_parameters(model)
    before = copy.deepcopy(model.state_dict())
    x = distribute_tensor(torch.ones(2, 4, device=world.device), mesh, [R])
    model(x).sum().backward()
    optimizer.step()
    moved = (model.weight.full_tensor() - before["weight"].full_tensor()).abs().max().item()
    assert abs(moved - 0.2) < 1e-6


@distributed(world_size=1, backends=TORCH)
def test_buffers_stay_real_unless_they_are_included(world: World) -> None:
    with init_empty_weights():
        norm = torch.nn.BatchNorm1d(3)
        norm.running_mean.fill_(2.0)
    assert norm.weight.is_meta
    assert not norm.running_mean.is_meta
    init_parameters(norm)
    assert norm.running_mean.tolist() == [2.0] * 3, "what had values keeps them"
    assert norm.weight.tolist() == [1.0] * 3
    assert not torch.nn.Linear(2, 2).weight.is_meta, "the block is over"


@distributed(world_size=1, backends=TORCH)
def test_blocks_may_be_nested_and_end_with_an_error(world: World) -> None:
    with init_empty_weights():
        with init_on_device("cpu"):
            inner = torch.nn.Linear(2, 2)
        outer = torch.nn.Linear(2, 2)
    assert not inner.weight.is_meta
    assert outer.weight.is_meta
    with pytest.raises(ZeroDivisionError), init_empty_weights(include_buffers=True):
        _ = 1 / 0
    assert not torch.nn.Linear(2, 2).weight.is_meta
    assert not torch.ones(2).is_meta


@distributed(world_size=1, backends=TORCH)
def test_what_nobody_initialises_is_named_and_nothing_is_changed(world: World) -> None:
    class Bare(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)
            self.gate = torch.nn.Parameter(torch.zeros(3))

    with init_empty_weights():
        model = torch.nn.Sequential(Bare(), torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"nobody initialises 0\.gate:.*initializers="):
        init_parameters(model)
    assert all(p.is_meta for p in model.parameters())
    with pytest.raises(ValueError, match=r"no deferred tensor of this name; did you mean '0\.gate'"):
        init_parameters(model, initializers={"0.gat": torch.nn.init.ones_})
    with pytest.raises(ValueError, match="must be a function that writes the tensor, got 3"):
        init_parameters(model, initializers={"0.gate": 3})
    init_parameters(model, initializers={"0.gate": torch.nn.init.ones_, "1.bias": lambda x: x.fill_(4)})
    assert model[0].gate.tolist() == [1.0] * 3 and model[1].bias.tolist() == [4.0] * 2


@distributed(world_size=1, backends=TORCH)
def test_what_a_method_leaves_out_is_named(world: World) -> None:
    class Forgetful(Scale):
        def __init__(self) -> None:
            super().__init__(3)
            self.shift = torch.nn.Parameter(torch.zeros(3))

    with init_empty_weights():
        model = torch.nn.Sequential(Forgetful())
    with pytest.raises(RuntimeError, match=r"0\.shift have? left|own 0\.shift"):
        init_parameters(model)


@distributed(world_size=1, backends=TORCH)
def test_a_parent_may_change_what_its_children_have_set(world: World) -> None:
    random.manual_seed(1)
    with random.global_draws():
        built = torch.nn.MultiheadAttention(4, 2)
    random.manual_seed(1)
    with init_empty_weights():
        deferred = torch.nn.MultiheadAttention(4, 2)
    init_parameters(deferred)
    assert built.out_proj.bias.tolist() == [0.0] * 4
    for name, value in built.state_dict().items():
        assert torch.equal(deferred.state_dict()[name], value), name
