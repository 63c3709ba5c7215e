"""What is refused of a function in the place of the Newton-Schulz iteration, and how ranks compare it."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import Shard, distribute_tensor
from hp_optim import Muon, sinkhorn
from hp_optim.muon.kinds import name_of
from hp_platform import get_platform, init_device_mesh
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from transform_parts import array, parameter, polar, twice


def first_only(stack: Any) -> Any:
    return stack[:1]


def flat(stack: Any) -> Any:
    return get_platform().reshape(stack, (-1,))


def nothing(stack: Any) -> Any:
    return None


def a_number(stack: Any) -> Any:
    return 0.5


def as_numpy(stack: Any) -> Any:
    return get_platform().to_numpy(stack)


WRONG_RESULTS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "nothing": (nothing, TypeError, "returned a NoneType"),
    "a number": (a_number, TypeError, "returned a float"),
    "an array": (as_numpy, TypeError, "returned a ndarray"),
    "fewer matrices": (first_only, ValueError, r"returned a tensor of shape \(1, 4, 3\)"),
    "a vector": (flat, ValueError, r"returned a tensor of shape \(60,\)"),
}


@pytest.mark.parametrize("name", WRONG_RESULTS)
@distributed(world_size=1, backends=["torch", "mindspore"])
def test_a_result_that_does_not_fit_is_refused_with_the_parameters(name: str) -> None:
    function, error, message = WRONG_RESULTS[name]
    pairs = [(f"layers.{number}.w", parameter(4, 3, seed=number)) for number in range(5)]
    optimizer = Muon([*pairs, ("other", parameter(3, 3))], ns_transform_fn=function)
    known = (
        rf"Muon: ns_transform_fn {re.escape(name_of(function))} {message} for a stack of matrices of layers\.0\.w, layers\.1\.w, "
        r"layers\.2\.w and 2 more; expected is a plain tensor of the stack's shape \(5, 4, 3\) on cpu: return what every matrix becomes"
    )
    with pytest.raises(error, match=known):
        optimizer.step()


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a name": (
        lambda: Muon([parameter(4, 3)], ns_transform_fn="sinkhorn"),
        r"Muon: ns_transform_fn is 'sinkhorn'; expected a function of a stack of matrices \(b, rows, cols\), such as hp_optim.sinkhorn\(\)",
    ),
    "a number in a group": (
        lambda: Muon([{"params": [parameter(4, 3)], "ns_transform_fn": 5}]),
        "ns_transform_fn is 5; expected a function",
    ),
    "steps of the iteration beside it": (
        lambda: Muon([parameter(4, 3)], ns_transform_fn=twice, ns_steps=6),
        r"Muon: ns_steps 6 and ns_coefficients 'asym5' are of Newton-Schulz, and ns_transform_fn .*twice takes its place: leave them out",
    ),
    "coefficients beside it": (
        lambda: Muon([parameter(4, 3)], ns_transform_fn=sinkhorn(3), ns_coefficients="quintic"),
        r"ns_coefficients 'quintic' are of Newton-Schulz, and ns_transform_fn hp_optim\..*sinkhorn\(steps=3\) takes its place",
    ),
    "both in a group": (
        lambda: Muon([{"params": [parameter(4, 3)], "ns_transform_fn": twice, "ns_steps": 6}]),
        "ns_steps 6 and .* takes its place",
    ),
    "steps in a group that inherits the function": (
        lambda: Muon([{"params": [parameter(4, 3)], "ns_steps": 6}], ns_transform_fn=twice),
        "ns_steps 6 and .* or give ns_transform_fn=None",
    ),
    "the maker of a function": (
        lambda: Muon([parameter(4, 3)], ns_transform_fn=sinkhorn).step(),
        r"steps is a .*Tensor; expected a whole number of at least 1\. .* Muon\(\.\.\., ns_transform_fn=sinkhorn\(\)\)",
    ),
    "what others call the coefficients": (
        lambda: Muon([parameter(4, 3)], ns_variant="asym5"),
        "Muon has no 'ns_variant'; .* does not take. 'ns_variant' is 'ns_coefficients' here",
    ),
    "what others call the coefficients, in a group": (
        lambda: Muon([{"params": [parameter(4, 3)], "ns_variant": "asym5"}]),
        "the key 'ns_variant', .* did you mean 'ns_coefficients'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@distributed(world_size=1, backends=["torch", "mindspore"])
def test_wrong_arguments_are_refused_with_what_to_change(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call()


@distributed(world_size=1, backends=["torch", "mindspore"])
def test_a_group_with_a_function_may_inherit_the_iteration_of_the_others(world: World) -> None:
    groups = [{"params": [parameter(4, 3)]}, {"params": [parameter(4, 3)], "ns_transform_fn": twice}]
    optimizer = Muon(groups, ns_steps=6, ns_coefficients=[[3.0, -4.0, 2.0]])
    optimizer.add_param_group({"params": [parameter(3, 2)], "ns_transform_fn": polar})
    Muon(
        [{"params": [parameter(4, 3)], "ns_transform_fn": None, "ns_steps": 6}], ns_transform_fn=twice
    ).step()
    optimizer.step()


class Doubling:
    """Can be called, and has a method that is a function, too."""

    def __call__(self, stack: Any) -> Any:
        return twice(stack)

    def method(self, stack: Any) -> Any:
        return twice(stack)


@pytest.mark.once
def test_functions_are_named_alike_on_all_ranks() -> None:
    assert name_of(twice) == name_of(functools.partial(twice)) == "transform_parts.twice"
    assert name_of(Doubling()) == f"{__name__}.Doubling"
    assert name_of(Doubling().method) == f"{__name__}.Doubling.method"
    assert name_of(sinkhorn(4)) == "hp_optim.muon.sinkhorn.sinkhorn(steps=4)"
    assert "<lambda>" in name_of(lambda stack: stack)


@distributed(world_size=2, backends=["torch"])
def test_ranks_with_different_functions_are_told(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    weight = distribute_tensor(world.platform.tensor(array(4, 3), "float32"), mesh, [Shard(0)])
    weight.requires_grad_(True)
    weight.grad = distribute_tensor(world.platform.tensor(array(4, 3), "float32"), mesh, [Shard(0)])
    optimizer = Muon([("w", weight)], ns_transform_fn=sinkhorn(3 + world.rank), ns_dtype="float32")
    message = (
        r"the ranks that exchange matrices do not step alike.*rank 0 has w .*function 0, hp_optim\.muon\.sinkhorn\.sinkhorn\(steps=3\), "
        r"in float32 on cpu: with a gradient; rank 1 has w .*sinkhorn\(steps=4\)"
    )
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
