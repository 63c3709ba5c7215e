"""Wrong calls with optimizers and their states are refused before anything is written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_fsdp import (
    StateDictOptions,
    fully_shard,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import Maker, make_mesh
from momentum_states import FROM_0, FULL, Momentum, params, trained


@distributed(world_size=2)
def test_wrong_calls_with_optimizers_are_refused_before_anything_is_written(world: World) -> None:
    platform = world.platform
    model, optimizer = trained(world, "mlp")
    state = get_optimizer_state_dict(model, optimizer, options=FULL)
    kept = get_optimizer_state_dict(model, optimizer, options=FULL)
    ps = params(world, model)
    stranger = Maker(world).parameter(2, 2)
    nested = Momentum(ps)
    nested.state[ps[0]] = {"directions": [platform.detach(ps[0].to_local())]}

    def with_state(**entry: Any) -> dict[str, Any]:
        return {**state, "state": {**state["state"], "head.bias": {**state["state"]["head.bias"], **entry}}}

    groups = state["param_groups"]
    halves = [
        {**groups[0], "params": groups[0]["params"][:4]},
        {**groups[0], "params": groups[0]["params"][4:]},
    ]
    wrong_shape = with_state(velocity=state["state"]["head.weight"]["velocity"])
    numbered = {"state": {}, "param_groups": [{"params": [0, 1]}]}
    unknown = [{**groups[0], "params": [*groups[0]["params"][1:], "more"]}]

    def reading(wrong: Any) -> Any:
        return lambda: get_optimizer_state_dict(model, wrong)

    def loading(wrong: Any) -> Any:
        return lambda: set_optimizer_state_dict(model, optimizer, wrong)

    cases = [
        (reading(3), ValueError, r"an optimizer has param_groups and state, .*; got int"),
        (
            reading(Momentum([stranger])),
            ValueError,
            r"param_groups\[0\]\['params'\]\[0\] of the optimizer, of shape \(2, 2\), is no parameter of HSDPModel: make "
            r"optimizers after fully_shard",
        ),
        (
            reading(nested),
            ValueError,
            r"blocks\.0\.inner\.weight/directions of the optimizer is a list with tensors",
        ),
        (loading({"state": {}}), ValueError, r"has 'state' and 'param_groups', .*; got \['state'\]"),
        (loading([]), ValueError, r"has 'state' and 'param_groups', .*; got list"),
        (loading(numbered), ValueError, r"has the parameter 0; parameters stand by their names here"),
        (
            loading({**state, "param_groups": halves}),
            ValueError,
            r"has parameters of the groups \[0, 1\] of the state",
        ),
        (
            loading(wrong_shape),
            ValueError,
            r"'head\.bias/velocity' has shape \(3,\), .* has \(3, 4\), which is neither",
        ),
        (
            loading({"state": {}, "param_groups": unknown}),
            RuntimeError,
            r"the optimizer of HSDPModel: missing blocks\.0\.inner\.weight; unexpected more; make the optimizer of",
        ),
        (
            loading(with_state(more=[stranger])),
            ValueError,
            r"head\.bias/more of the optimizer is a list with tensors",
        ),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
    for given, error, message in (
        (numbered, ValueError, "has the parameter 0"),
        (wrong_shape, ValueError, r"'head\.bias/velocity' has shape"),
    ):
        with pytest.raises(error, match=message):
            set_optimizer_state_dict(model, optimizer, given if world.rank == 0 else {}, options=FROM_0)
    loose = StateDictOptions(strict=False)
    names = set_optimizer_state_dict(model, optimizer, {"state": {}, "param_groups": []}, options=loose)
    assert names == ([n for n, _ in platform.named_parameters(model)], [])
    found = get_optimizer_state_dict(model, optimizer, options=FULL)
    assert_parity(found["state"], kept["state"], exact=True)
    assert found["param_groups"] == kept["param_groups"]


@distributed(world_size=1)
def test_the_frameworks_own_optimizers_are_refused_with_a_way_out_where_they_keep_their_state_elsewhere(
    world: World,
) -> None:
    """Modules, as MindSpore's are; some of those have empty ``state``, which would be saved as if it were all."""
    model = fully_shard(Maker(world).linear(2, 2), make_mesh(world))

    class Adam(world.platform.Module):
        """Stands for one of the framework's own."""

    Adam.__module__ = f"{world.platform.platform_type.value}.optim"
    own = Adam()
    own.param_groups, own.state = [{"params": params(world, model)}], {}
    if world.platform.supports("optimizer_state"):
        assert get_optimizer_state_dict(model, own)["state"] == {}
        return
    message = (
        r"the state dict of Adam needs 'optimizer_state', which \w+ .* does not have: .* use one that does"
    )
    with pytest.raises(NotImplementedError, match=message):
        get_optimizer_state_dict(model, own)


@distributed(world_size=1)
def test_a_module_is_no_optimizer(world: World) -> None:
    model = fully_shard(Maker(world).linear(2, 2), make_mesh(world))
    with pytest.raises(ValueError, match=r"an optimizer has param_groups and state, .*; got Linear"):
        get_optimizer_state_dict(model, Maker(world).linear(2, 2))
