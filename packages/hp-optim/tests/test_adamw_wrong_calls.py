"""Wrong calls of AdamW are refused when it is made, with what was given and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hp_optim import AdamW
from hp_platform import get_platform
from hp_platform.testing import World, distributed


@dataclass(frozen=True)
class Call:
    """What is given, and what is said."""

    message: str
    params: Callable[[], Any] | None = None
    """None: one parameter."""
    error: type[Exception] = ValueError
    options: Any = None


def one(dtype: str = "float32") -> Any:
    return get_platform().parameter(get_platform().zeros((2, 3), dtype))


def from_before() -> Any:
    parameter = one()
    parameter._hp_fsdp_successor = object()
    return [("layers.0.weight", parameter)]


def twice() -> Any:
    parameter = one()
    return [{"params": [parameter]}, {"params": [parameter]}]


CALLS = {
    "unknown arguments": Call(
        "AdamW has no 'foreach', 'momentum'; it takes amsgrad, betas, divide_replicas, eps, fused, lr, maximize, "
        "offload_bucket, offload_state, weight_decay",
        options={"foreach": False, "momentum": 0.9},
    ),
    "negative lr": Call("AdamW: lr is -0.1; it must be a finite number, at least 0", options={"lr": -0.1}),
    "infinite lr": Call("AdamW: lr is inf; it must be a finite number", options={"lr": float("inf")}),
    "lr as text": Call("AdamW: lr is '1e-3'; it must be a finite number", options={"lr": "1e-3"}),
    "lr of two": Call(
        "AdamW: lr is a tensor of shape (2,); as a tensor it has one element", options={"lr": "two"}
    ),
    "one beta": Call(
        "AdamW: betas is 0.9; it is a pair of numbers such as (0.9, 0.999)", options={"betas": 0.9}
    ),
    "three betas": Call("AdamW: betas is (0.9, 0.9, 0.9); it is a pair", options={"betas": (0.9, 0.9, 0.9)}),
    "first beta of 1": Call(
        "AdamW: betas[0] is 1.0; it must be a finite number, at least 0 and below 1: the share of a moment that stays",
        options={"betas": (1.0, 0.9)},
    ),
    "second beta below 0": Call("AdamW: betas[1] is -0.5; it must be", options={"betas": (0.9, -0.5)}),
    "negative eps": Call(
        "AdamW: eps is -1e-08; it must be a finite number, at least 0", options={"eps": -1e-8}
    ),
    "negative decay": Call(
        "AdamW: weight_decay is -1; it must be a finite number, at least 0: for none give 0",
        options={"weight_decay": -1},
    ),
    "amsgrad as number": Call("AdamW: amsgrad is 1; it must be True or False", options={"amsgrad": 1}),
    "maximize as text": Call("AdamW: maximize is 'no'; it must be True or False", options={"maximize": "no"}),
    "fused as number": Call("AdamW: fused is 0; it must be True, False or None", options={"fused": 0}),
    "divide as text": Call(
        "AdamW: divide_replicas is 'dp'; it must be True or False", options={"divide_replicas": "dp"}
    ),
    "no parameters": Call(
        "AdamW: params is empty; an optimizer has at least one parameter", lambda: iter(())
    ),
    "a tensor": Call("AdamW: params is a ", one),
    "an array": Call(
        "AdamW: parameter 0 is a numpy.ndarray; parameters are tensors of the one framework of this process",
        lambda: [np.zeros(3)],
    ),
    "from before fully_shard": Call(
        "AdamW: parameter 'layers.0.weight', of shape (2, 3), is a parameter from before fully_shard, which the model does not use any "
        "more: make the optimizer after fully_shard",
        from_before,
    ),
    "in two groups": Call(
        "AdamW: parameter 0 of the new group, of shape (2, 3), is in another group already", twice
    ),
    "integers": Call(
        "AdamW: parameter 'ids', of shape (3,), has dtype", lambda: [("ids", get_platform().arange(0, 3))]
    ),
    "a misspelt key": Call(
        "AdamW: a group has the key 'weight_decays', which is no hyperparameter and would be ignored; did you mean 'weight_decay'?",
        lambda: [{"params": [one()], "weight_decays": 0.0}],
    ),
    "a wrong group": Call(
        "AdamW: eps is nan; it must be a finite number", lambda: [{"params": [one()], "eps": float("nan")}]
    ),
    "names in one group only": Call(
        "AdamW: some groups have names of parameters and some have not",
        lambda: [{"params": [("a", one())]}, {"params": [one()]}],
    ),
}


@pytest.mark.parametrize("name", list(CALLS))
@distributed(world_size=1)
def test_a_wrong_call_is_refused(world: World, name: str) -> None:
    call = CALLS[name]
    options = dict(call.options or {})
    if options.get("lr") == "two":
        options["lr"] = world.platform.zeros((2,))
    params = [one()] if call.params is None else call.params()
    with pytest.raises(call.error, match=re.escape(call.message)):
        AdamW(params, **options)


@distributed(world_size=1)
def test_fused_is_refused_where_there_is_no_such_kernel(world: World) -> None:
    platform = world.platform
    parameter = platform.parameter(platform.zeros((2,), "float32", world.device))
    if platform.supports("fused_adamw", world.device):
        assert AdamW([parameter], fused=True).param_groups[0]["fused"] is True
        return
    with pytest.raises(
        NotImplementedError, match=r"AdamW\(fused=True\) needs 'fused_adamw'.*leave out fused=True"
    ):
        AdamW([parameter], fused=True)
