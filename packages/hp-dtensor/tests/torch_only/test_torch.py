"""DTensors in torch's own functions: every spelling of every rule, and what stands beside them."""

import inspect
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from placed_tensors import TORCH, make_mesh
from torch_calls import KEYWORDS, arguments_of, spellings
from torch_operands import tensors_for

# Elementwise functions and a single product, in float64.
TOLERANCE = 1e-13


@distributed(world_size=2, backends=TORCH)
def test_every_spelling_of_every_rule_gives_the_unsharded_value(world: World) -> None:
    mesh, tried = make_mesh(world), 0
    for name, home in spellings():
        function = getattr(home, name)
        plain = {n: t.to(world.device) for n, t in tensors_for(name).items()}
        keywords = KEYWORDS.get(name, {})
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"index_reduce\(\) is in beta", UserWarning)
            whole = function(*arguments_of(name, home, plain), **keywords)
        if whole is None:
            continue  # written: test_writes
        for placement in (Shard(0), Replicate()):
            cut = {
                n: distribute_tensor(t, mesh, [placement if t.ndim > 1 else Replicate()])
                for n, t in plain.items()
            }
            found = function(*arguments_of(name, home, cut), **keywords)
            label = f"{getattr(home, '__name__', home)}.{name} of {placement}"
            several = found if isinstance(found, tuple) else (found,)
            for result, value in zip(several, whole if isinstance(whole, tuple) else (whole,), strict=True):
                if isinstance(value, bool):
                    assert result is value, label
                    continue
                assert isinstance(result, DTensor), label
                assert_parity(result, value, rtol=TOLERANCE, atol=TOLERANCE, name=label)
        tried = tried + 1
    assert tried > 300


@distributed(world_size=2, backends=TORCH)
def test_every_function_of_torch_has_a_rule_or_is_refused(world: World) -> None:
    """Called with DTensors for all its arguments, no function gives anything of a shard's shape."""
    x = distribute_tensor(
        torch.ones(7, 11, dtype=torch.float64, device=world.device), make_mesh(world), [Shard(0)]
    )
    shard = tuple(x.to_local().shape)
    refused = 0
    for function, example in torch.overrides.get_testing_overrides().items():
        if "distributed" in (getattr(function, "__module__", None) or ""):
            continue  # collectives: they would wait for each other
        if function is torch.Tensor.__reduce_ex__:
            continue  # a pickle holds the piece
        needed = [p for p in inspect.signature(example).parameters.values() if p.default is p.empty]
        args = [x for p in needed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch about its own old functions
                result = function(*args)
        except NotImplementedError as error:
            # Else what torch itself does not implement for such arguments.
            refused = refused + ("has no rule for DTensors" in str(error))
        except (ValueError, TypeError, RuntimeError, IndexError, AssertionError):
            continue  # arguments that make no sense
        else:
            plain = [r for r in torch.utils._pytree.tree_leaves(result) if type(r) is torch.Tensor]
            assert shard not in [tuple(r.shape) for r in plain], f"{function} computed on a shard"
    assert refused > 100


@distributed(world_size=2, backends=TORCH)
def test_operators_beside_what_is_no_number_answer_as_those_of_a_tensor(world: World) -> None:
    plain = torch.ones(7, 11, dtype=torch.float64, device=world.device)
    for placement in (Shard(0), Replicate()):
        x = distribute_tensor(plain, make_mesh(world), [placement])
        for other in (None, "a", ..., object()):
            for _ in range(2):  # also where the operation is known
                assert (x == other) is (plain == other) is False
                assert (other == x) is False
                assert (x != other) is True
                for call in (lambda a, b: a + b, lambda a, b: b - a, lambda a, b: a < b, lambda a, b: b / a):
                    with pytest.raises(TypeError, match="not supported between|unsupported operand|str"):
                        call(x, other)


@distributed(world_size=2, backends=TORCH)
def test_options_that_are_not_linear_reduce_first(world: World) -> None:
    local = torch.full((4,), [1.25, 2.5][world.rank], dtype=torch.float64, device=world.device)
    x = DTensor.from_local(local, make_mesh(world), [Partial()])
    for call in (
        lambda t: t.sum(dtype=torch.int64),
        lambda t: torch.sum(t, 0, dtype=torch.int64),
        lambda t: torch.div(t, 2, rounding_mode="floor"),
        lambda t: t.long(),
        lambda t: t + numpy.float32(2),
    ):
        found = call(x)
        assert found.placements == (Replicate(),)
        assert_parity(
            found, call(torch.full((4,), 3.75, dtype=torch.float64, device=world.device)), exact=True
        )
    known = len(x._spec.plans)
    for n in range(5):
        _ = x * numpy.float64(n)
    assert len(x._spec.plans) == known + 1


@distributed(world_size=2, backends=TORCH)
def test_rows_of_truth_values_are_truth_values(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    whole = torch.arange(15, device=world.device).reshape(5, 3) % 4 > 1
    places = torch.tensor([4, 0], device=world.device)
    x, at = distribute_tensor(whole, mesh, [Shard(0)]), distribute_tensor(places, mesh, [Replicate()])
    calls: dict[str, Any] = {
        "a row": lambda x, at: x[0],
        "rows": lambda x, at: x[1:3],
        "a part": lambda x, at: x.narrow(0, 3, 2),
        "one": lambda x, at: x.select(0, 4),
        "rows by number": lambda x, at: x[at],
        "slices by number": lambda x, at: x.index_select(0, at),
        "elements by number": lambda x, at: x.gather(0, at.reshape(2, 1)),
        "or": lambda x, at: x[0] | x[4],
        "as numbers": lambda x, at: x[0].double() + x[1].sum(),
    }
    for name, call in calls.items():
        assert_parity(call(x, at).full_tensor(), call(whole, places), exact=True, name=name)


@distributed(world_size=2, backends=TORCH)
def test_arguments_with_lists_in_them_are_mistakes_of_values(world: World) -> None:
    x = distribute_tensor(torch.ones(2, 3), init_device_mesh(world.device_type, (2,)), [Shard(0)])
    with pytest.raises(
        ValueError, match=r"view of a DTensor got an argument with which rule 'view' can do nothing"
    ):
        x.view(([3, 2],))


@distributed(world_size=2, backends=TORCH)
def test_squeezing_no_dim_squeezes_nothing(world: World) -> None:
    x = distribute_tensor(torch.ones(1, 3, 1), init_device_mesh(world.device_type, (2,)), [Shard(1)])
    assert x.squeeze(()).shape == (1, 3, 1)


@distributed(world_size=2, backends=TORCH)
def test_conjugates_travel_as_what_they_are(world: World) -> None:
    whole = torch.complex(*(torch.arange(6.0, device=world.device).reshape(3, 2) + i for i in (0, 1)))
    for dim in (0, 1):
        x = distribute_tensor(whole, init_device_mesh(world.device_type, (2,)), [Shard(dim)])
        assert_parity(x.adjoint().full_tensor(), whole.adjoint().resolve_conj(), exact=True)
