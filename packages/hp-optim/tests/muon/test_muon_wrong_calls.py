"""What Muon refuses, with the message; and what it takes beside the ordinary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_optim import Muon
from hp_platform import get_platform, init_device_mesh
from hp_platform.testing import World, distributed


def parameter(*shape: int, gradient: bool = True) -> Any:
    platform = get_platform()
    values = np.random.default_rng(0).normal(size=(2, *shape))
    found = platform.parameter(platform.tensor(values[0], "float32"))
    if gradient:
        platform.set_grad(found, platform.tensor(values[1], "float32"))
    return found


def partial() -> Any:
    mesh = init_device_mesh("cpu", (1,))
    return DTensor.from_local(get_platform().zeros((3, 4)), mesh, [Partial()], shape=(3, 4))


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a vector": (
        lambda: Muon([parameter(3, 4), parameter(4)]),
        r"Muon: a parameter of shape \(4,\) is a vector; Muon makes matrices orthogonal .* give it to AdamW",
    ),
    "a vector by name": (
        lambda: Muon([("norm.weight", parameter(4))]),
        r"Muon: parameter 'norm.weight' of shape \(4,\) is a vector",
    ),
    "a number": (lambda: Muon([parameter()]), r"of shape \(\) is a number"),
    "nothing": (lambda: Muon([]), "params is empty"),
    "an unknown option": (
        lambda: Muon([parameter(3, 4)], learning_rate=0.1),
        "Muon has no 'learning_rate'; it takes lr, matched_adamw_rms, memory_cap",
    ),
    "a misspelt option of a group": (
        lambda: Muon([{"params": [parameter(3, 4)], "momentun": 0.9}]),
        "'momentun', which is no hyperparameter .* did you mean 'momentum'",
    ),
    "a learning rate below 0": (lambda: Muon([parameter(3, 4)], lr=-1.0), r"lr is -1\.0"),
    "a decay below 0": (lambda: Muon([parameter(3, 4)], weight_decay=-0.1), r"weight_decay is -0\.1.* 0 for none"),
    "a momentum of 1": (
        lambda: Muon([parameter(3, 4)], momentum=1.0),
        r"momentum is 1\.0; it must be a finite number, at least 0 and below 1",
    ),
    "no steps": (lambda: Muon([parameter(3, 4)], ns_steps=0), "ns_steps is 0; a whole number of at least 1"),
    "unknown coefficients": (
        lambda: Muon([parameter(3, 4)], ns_coefficients="septic"),
        "ns_coefficients is 'septic'; expected 'asym5', 'quintic', 'polar-express'",
    ),
    "coefficients that are no triples": (
        lambda: Muon([parameter(3, 4)], ns_coefficients=[(1.0, 2.0)]),
        "expected triples of finite numbers",
    ),
    "an integer dtype": (
        lambda: Muon([parameter(3, 4)], ns_dtype="int32"),
        "ns_dtype is 'int32'; the iteration needs a floating dtype",
    ),
    "an unknown dtype": (lambda: Muon([parameter(3, 4)], ns_dtype="float8"), "float8"),
    "an unknown scale": (lambda: Muon([parameter(3, 4)], scale="big"), "scale is 'big'; expected 'match_rms_adamw'"),
    "a place for state": (
        lambda: Muon([parameter(3, 4)], offload_state="cpu"),
        "Muon: offload_state is 'cpu'; it must be True or False",
    ),
    "no memory": (
        lambda: Muon([parameter(3, 4)], memory_cap=0),
        "memory_cap is 0; expected bytes, a whole number of at least 1",
    ),
    "a split that does not fit": (
        lambda: Muon([parameter(6, 4)], split={"rows": [4, 4]}),
        r"has 6 rows, and the rule's \[4, 4\] make up 8",
    ),
    "patterns without names": (
        lambda: Muon([parameter(6, 4)], split={"*.wqkv": {"rows": [2, 2, 2]}}),
        "the parameters have none: give the optimizer .* pairs",
    ),
    "sums over ranks": (
        lambda: Muon([partial()]),
        r"lies as \(Partial\('sum'\),\), and its values are sums over ranks: redistribute",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@distributed(world_size=1, backends=["torch", "mindspore"])
def test_wrong_arguments_are_refused_with_what_to_change(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call()


@distributed(world_size=1, backends=["torch", "mindspore"])
def test_a_group_that_is_refused_changes_nothing(world: World) -> None:
    optimizer = Muon([parameter(3, 4)])
    with pytest.raises(ValueError, match="is a vector"):
        optimizer.add_param_group({"params": [parameter(5)]})
    assert len(optimizer.param_groups) == 1


@distributed(world_size=2, backends=["torch", "cuda"])
def test_a_state_dict_of_other_shards_is_refused(world: World) -> None:
    platform = world.platform

    def optimizer(dim: int) -> Any:
        mesh = init_device_mesh(world.device_type, (2,))
        value = platform.full((5, 4), 1.0, "float32", world.device)
        weight = distribute_tensor(value, mesh, [Shard(dim)]).requires_grad_(True)
        weight.grad = distribute_tensor(value, mesh, [Shard(dim)])
        return Muon([("w", weight)])

    first, second = optimizer(0), optimizer(1)
    first.step()
    second.load_state_dict(first.state_dict())
    message = r"the momentum of parameter 'w' of shape \(5, 4\) has shape \(\d, 4\) on this rank, which holds \(5, 2\)"
    with pytest.raises(RuntimeError, match=message):
        second.step()


@distributed(world_size=1)
def test_a_step_that_is_refused_is_not_counted_and_makes_no_state(world: World) -> None:
    platform = world.platform
    given, new = parameter(3, 4), parameter(4, 5)
    optimizer = Muon([{"params": [new]}, {"params": [given]}], ns_dtype="float32")
    platform.set_grad(new, None)
    optimizer.step()
    momentum = optimizer.state[given]["momentum_buffer"]
    platform.set_grad(new, platform.full((4, 5), 1.0, "float32"))
    optimizer.state[given]["momentum_buffer"] = platform.full((3, 5), 1.0, "float32")
    optimizer.param_groups[0]["ns_steps"] = 4
    with pytest.raises(RuntimeError, match="the momentum of parameter"):
        optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]
    assert not optimizer.state.get(new)
    optimizer.state[given]["momentum_buffer"] = momentum
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [2, 2]


@distributed(world_size=4, backends=["torch"])
def test_a_state_dict_of_shards_of_the_same_shape_that_lie_elsewhere_is_refused_on_all_ranks(
    world: World,
) -> None:
    platform = world.platform
    mesh = init_device_mesh(world.device_type, (2, 2))

    def optimizer(*placements: Any) -> Any:
        value = platform.full((6, 4), 1.0, "float32", world.device)
        weight = distribute_tensor(value, mesh, placements).requires_grad_(True)
        weight.grad = distribute_tensor(value, mesh, placements)
        return Muon([("w", weight)])

    first, second = optimizer(Shard(0), Replicate()), optimizer(Replicate(), Shard(0))
    first.step()
    second.load_state_dict(first.state_dict())
    message = r"momentum of parameter 'w' of shape \(6, 4\) lies as .*so a rank has other elements of it than of the"
    with pytest.raises(RuntimeError, match=message):
        second.step()


@distributed(world_size=2, backends=["torch"])
def test_a_state_dict_of_the_same_shards_of_another_mesh_is_taken(world: World) -> None:
    platform = world.platform
    value = platform.full((6, 4), 1.0, "float32", world.device)

    def optimizer() -> Any:
        mesh = init_device_mesh(world.device_type, (2,))
        weight = distribute_tensor(value, mesh, [Shard(0)]).requires_grad_(True)
        weight.grad = distribute_tensor(value, mesh, [Shard(0)])
        return Muon([("w", weight)])

    first, second = optimizer(), optimizer()
    first.step()
    second.load_state_dict(first.state_dict())
    first.step()
    second.step()
    (one,), (other,) = (
        [x["momentum_buffer"].to_local() for x in each.state.values()] for each in (first, second)
    )
    assert np.array_equal(platform.to_numpy(one), platform.to_numpy(other))


@distributed(world_size=1)
def test_a_learning_rate_may_be_a_tensor(world: World) -> None:
    platform = world.platform
    found = []
    for lr in (0.25, platform.full((), 0.25, "float32"), platform.full((1,), 0.25, "float32")):
        weight = parameter(5, 3)
        Muon([weight], lr=lr, ns_dtype="float32", weight_decay=0.5).step()
        found.append(platform.to_numpy(platform.detach(weight)))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-6)
    assert np.array_equal(found[2], found[1])


@distributed(world_size=1)
def test_functions_stay_with_the_optimizer_and_out_of_its_state_dict(world: World) -> None:
    platform = world.platform

    def optimizer(weight: Any) -> Any:
        return Muon(
            [("w", weight)],
            split=lambda name, shape: {"rows": 2},
            scale=lambda rows, cols: 0.5 * rows,
            ns_dtype=platform.dtype("float32"),
        )

    weights = [parameter(4, 3), parameter(4, 3)]
    first, second = optimizer(weights[0]), optimizer(weights[1])
    first.step()
    state = first.state_dict()
    assert not {"split", "scale"} & set(state["param_groups"][0])
    assert state["param_groups"][0]["ns_dtype"] == "float32"
    second.step()
    second.load_state_dict(state)
    for each in (first, second):
        each.step()
    values = [platform.to_numpy(platform.detach(weight)) for weight in weights]
    assert np.array_equal(values[0], values[1])


@distributed(world_size=1)
def test_options_of_groups_count_and_may_change_between_steps(world: World) -> None:
    platform = world.platform
    a, b = parameter(4, 3), parameter(4, 3)
    optimizer = Muon([{"params": [a], "ns_steps": 3}, {"params": [b]}], ns_dtype="float32")
    optimizer.step()
    values = [platform.to_numpy(platform.detach(weight)) for weight in (a, b)]
    assert not np.array_equal(values[0], values[1])
    one, other = parameter(4, 3), parameter(4, 3)
    found = []
    for weight, change in ((one, False), (other, True)):
        optimizer = Muon([weight], ns_dtype="float32", ns_steps=3 if change else 2)
        if change:
            optimizer.param_groups[0]["ns_steps"] = 2
        optimizer.step()
        optimizer.param_groups[0].update(ns_steps=4, lr=0.1, momentum=0.5)
        optimizer.step()
        found.append(platform.to_numpy(platform.detach(weight)))
    assert np.array_equal(found[0], found[1])


@distributed(world_size=1, backends=["torch", "cuda"])
def test_gradients_in_a_wider_dtype_are_kept_in_it(world: World) -> None:
    platform = world.platform
    weight = platform.parameter(platform.full((4, 3), 1.0, "bfloat16", world.device))
    weight.main_grad = platform.tensor(np.arange(12.0).reshape(4, 3), "float32", world.device)
    optimizer = Muon([weight])
    optimizer.step()
    assert platform.dtype_name(optimizer.state[weight]["momentum_buffer"].dtype) == "float32"
    assert platform.dtype_name(weight.dtype) == "bfloat16"


@distributed(world_size=1, backends=["torch", "cuda"])
def test_momentum_of_a_run_in_a_narrower_dtype_is_widened(world: World) -> None:
    platform = world.platform
    narrow = platform.parameter(platform.full((4, 3), 1.0, "bfloat16", world.device))
    platform.set_grad(narrow, platform.full((4, 3), 1.0, "bfloat16", world.device))
    before = Muon([narrow])
    before.step()
    weight = platform.parameter(platform.full((4, 3), 1.0, "float32", world.device))
    gradient = np.arange(12.0, dtype="float32").reshape(4, 3) / 1000
    platform.set_grad(weight, platform.tensor(gradient, "float32", world.device))
    optimizer = Muon([weight])
    optimizer.load_state_dict(before.state_dict())
    optimizer.step()
    momentum = optimizer.state[weight]["momentum_buffer"]
    assert platform.dtype_name(momentum.dtype) == "float32"
    np.testing.assert_allclose(platform.to_numpy(momentum), 0.95 + gradient, rtol=1e-6)
