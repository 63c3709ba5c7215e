"""A function of the caller's in the place of the Newton-Schulz iteration: what it gets, and what comes of it."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hp_optim import Muon, sinkhorn
from hp_optim.muon.transform import transform_bytes
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import muon_oracle
from transform_parts import array, parameter, polar, twice, values


@distributed(world_size=1)
def test_it_makes_of_every_matrix_what_the_function_says(world: World) -> None:
    shapes = {
        "weight": (6, 4),
        "experts": (3, 5, 4),
        "convolution": (6, 2, 2, 2),
        "fused": (8, 5),
        "row": (1, 4),
    }
    parameters = {name: parameter(*shape) for name, shape in shapes.items()}
    options: dict[str, Any] = {"lr": 0.1, "scale": lambda rows, cols: 0.5 * rows}
    for function, oracle in ((polar, muon_oracle.polar), (sinkhorn(), muon_oracle.sinkhorn)):
        optimizer = Muon(
            parameters.items(),
            ns_transform_fn=function,
            ns_dtype="float32",
            split={"fused": {"rows": [4, 2, 2]}},
            **options,
        )
        expected = muon_oracle.Muon(
            dict(zip(parameters, values(*parameters.values()), strict=True)),
            cut={"fused": muon_oracle.rows(4, 2, 2)},
            transform=oracle,
            dtype="float32",
            **options,
        )
        for _ in range(2):
            optimizer.step()
            expected.step({name: array(*shape, seed=100) for name, shape in shapes.items()})
        for name, found in zip(parameters, values(*parameters.values()), strict=True):
            # Updates of size 1, in float32.
            np.testing.assert_allclose(found, expected.params[name], rtol=0, atol=5e-6, err_msg=name)


@distributed(world_size=1)
def test_it_gets_plain_contiguous_stacks_that_it_may_write_on_and_records_nothing(world: World) -> None:
    platform, seen = world.platform, []

    def look(stack: Any) -> Any:
        name = platform.dtype_name(stack.dtype)
        is_plain = platform.is_contiguous(stack) and not hasattr(stack, "device_mesh")
        seen.append(
            (tuple(stack.shape), name, platform.device_of(stack), is_plain, platform.is_grad_enabled())
        )
        return platform.mul_(stack, 0.0)

    parameters = [parameter(4, 3), parameter(5, 3), parameter(4, 3, seed=1)]
    before = values(*parameters)
    optimizer = Muon(parameters, ns_transform_fn=look, ns_dtype="float32", weight_decay=0.0, nesterov=False)
    optimizer.step()
    assert sorted(seen) == [
        ((1, 5, 3), "float32", "cpu", True, False),
        ((2, 4, 3), "float32", "cpu", True, False),
    ]
    for x, start, weight, seed in zip(values(*parameters), before, parameters, (100, 100, 101), strict=True):
        assert np.array_equal(x, start), "an update of zeros"
        (momentum,) = values(optimizer.state[weight]["momentum_buffer"])
        assert np.array_equal(momentum, array(*x.shape, seed=seed)), "momentum is not what it writes on"


@distributed(world_size=1)
def test_results_may_be_wider_transposed_recorded_or_the_stack_itself(world: World) -> None:
    platform = world.platform

    def wider(stack: Any) -> Any:
        return platform.cast(
            stack, "float64" if platform.supports("float64_compute", world.device) else "float32"
        )

    def transposed(stack: Any) -> Any:
        return platform.transpose(platform.contiguous(platform.transpose(stack, 1, 2)), 1, 2)

    def recorded(stack: Any) -> Any:
        with platform.enable_grad():
            return platform.set_requires_grad_(platform.clone(stack), True) * 1.0

    def itself(stack: Any) -> Any:
        return stack

    found = []
    for function in (itself, wider, transposed, recorded):
        parameters = [parameter(4, 3), parameter(4, 3, seed=1), parameter(3, 2, 4)]
        Muon(parameters, ns_transform_fn=function, ns_dtype="float32", scale="none", lr=1.0).step()
        found.append(values(*parameters))
        assert not any(platform.requires_grad(platform.get_grad(each)) for each in parameters)
    for other in found[1:]:
        assert all(np.array_equal(x, y) for x, y in zip(found[0], other, strict=True))
    start, gradient = array(4, 3), array(4, 3, seed=100)
    np.testing.assert_allclose(found[0][0], 0.9 * start - 1.95 * gradient, rtol=0, atol=1e-6)


@distributed(world_size=1)
def test_groups_may_have_different_functions_or_none(world: World) -> None:
    shape, options = (4, 3), {"ns_dtype": "float32", "ns_steps": 7}
    together = [parameter(*shape, seed=seed) for seed in range(5)]
    called: list[tuple[str, int]] = []

    def noted(name: str, stack: Any) -> Any:
        called.append((name, stack.shape[0]))
        return twice(stack) if name == "b" else polar(stack)

    a, b = functools.partial(noted, "a"), functools.partial(noted, "b")
    functions = (a, b, a, None, b)
    Muon(
        [{"params": [p], "ns_transform_fn": f} for p, f in zip(together, functions, strict=True)], **options
    ).step()
    # Of one shape: those of one function in one stack, though they stand in different groups.
    assert sorted(called) == [("a", 2), ("b", 2)]
    alone = [parameter(*shape, seed=seed) for seed in range(5)]
    for each, function in zip(alone, functions, strict=True):
        Muon([{"params": [each], "ns_transform_fn": function}], **options).step()
    for x, y in zip(values(*together), values(*alone), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)
    assert not np.array_equal(*values(together[0], together[3]))


@distributed(world_size=1)
def test_a_function_may_change_between_steps(world: World) -> None:
    one, other = parameter(4, 3), parameter(4, 3)
    first = Muon([one], ns_transform_fn=polar, ns_dtype="float32")
    first.step()
    first.param_groups[0]["ns_transform_fn"] = twice
    first.step()
    before, after = (Muon([other], ns_transform_fn=f, ns_dtype="float32") for f in (polar, twice))
    before.step()
    after.load_state_dict(before.state_dict())
    after.step()
    assert np.array_equal(*values(one, other))


@distributed(world_size=1)
def test_functions_of_groups_stay_when_a_state_dict_is_loaded(world: World) -> None:
    def optimizer(weights: list[Any], *functions: Any) -> Any:
        groups = [{"params": [w], "ns_transform_fn": f} for w, f in zip(weights, functions, strict=True)]
        groups[1] |= {"scale": lambda rows, cols: 0.2, "split": {"rows": 2}}
        return Muon(groups, ns_dtype="float32")

    weights, others = ([parameter(4, 3), parameter(4, 3, seed=1)] for _ in range(2))
    first, second = optimizer(weights, polar, sinkhorn()), optimizer(others, polar, sinkhorn())
    first.step()
    state = first.state_dict()
    assert not any("ns_transform_fn" in group for group in state["param_groups"])
    assert [("scale" in group, group["split"]) for group in state["param_groups"]] == [
        (True, None),
        (False, {"rows": 2}),
    ]
    second.step()
    second.load_state_dict(state)
    own = [group["ns_transform_fn"] for group in second.param_groups]
    assert own == [polar, sinkhorn()]
    for each in (first, second):
        each.step()
    for x, y in zip(values(*weights), values(*others), strict=True):
        assert np.array_equal(x, y)
    # Of Newton-Schulz, too: what this optimizer was made for counts.
    iterated = optimizer([parameter(4, 3), parameter(4, 3)], None, None)
    iterated.step()
    second.load_state_dict(iterated.state_dict())
    assert [group["ns_transform_fn"] for group in second.param_groups] == own
    assert callable(second.param_groups[1]["scale"])
    iterated.load_state_dict(state)
    assert [group["ns_transform_fn"] for group in iterated.param_groups] == [None, None]


@distributed(world_size=1, backends=["torch"])
def test_stacks_and_what_is_made_of_them_stay_below_the_cap(world: World) -> None:
    sizes: list[int] = []

    def look(stack: Any) -> Any:
        sizes.append(stack.shape[0])
        return stack

    # Stacked, as argument and as result in 4 bytes, and two copies of 4 bytes.
    assert transform_bytes((4, 3), 4, 4) == 12 * 20
    assert transform_bytes((4, 3), 4, 2) == 12 * 16
    assert transform_bytes((4, 3), 8, 8) == 12 * 40
    parameters = [parameter(4, 3, seed=seed) for seed in range(16)]
    Muon(parameters, ns_transform_fn=look, ns_dtype="float32", memory_cap=4 * 12 * 20).step()
    assert sum(sizes) == 16
    assert max(sizes) == 4
