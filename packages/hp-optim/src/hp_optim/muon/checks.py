"""What Muon takes as a group: hyperparameters, and parameters that are made of matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_dtensor.placements import Partial
from hp_dtensor.spec import shown
from hp_optim.checks import check_learning_rate, check_number
from hp_optim.groups import Group
from hp_optim.muon.coefficients import DEFAULT_SET, DEFAULT_STEPS, Coefficients, coefficients_of
from hp_optim.muon.kinds import TRANSFORM, name_of
from hp_optim.muon.matrices import matrices_of, rule_for
from hp_optim.muon.newton_schulz import MEMORY_CAP
from hp_optim.muon.placed import named
from hp_optim.muon.scale import scale_rule
from hp_optim.muon.transform import check_function
from hp_platform.platform import Platform


def check_group(platform: Platform, name: str, group: Group, defaults: Group) -> None:
    """ValueError for what the optimizer ``name`` does not take, parameters only where the group has some.

    ``defaults``: the options that groups inherit, as a group.
    """
    check_learning_rate(platform, name, group["lr"])
    check_number(name, "weight_decay", group["weight_decay"], advice="give 0.1, or 0 for none")
    check_number(name, "momentum", group["momentum"], below=1.0, advice="give 0.95")
    scale_rule(group["scale"], group["matched_adamw_rms"])
    coefficients_of(group["ns_coefficients"]).of_steps(group["ns_steps"])
    _check_transform(name, group, defaults)
    given = group["ns_dtype"]
    if given is not None and not platform.is_floating(platform.dtype(given)):
        raise ValueError(
            f"{name}: ns_dtype is {platform.dtype_name(platform.dtype(given))!r}; the iteration needs a floating dtype: give "
            "'bfloat16', 'float16', 'float32' or 'float64', or leave it out"
        )
    cap = group["memory_cap"]
    if isinstance(cap, bool) or not isinstance(cap, int) or cap < 1:
        raise ValueError(
            f"{name}: memory_cap is {cap!r}; expected bytes, a whole number of at least 1, as the usual {MEMORY_CAP}"
        )
    for parameter, label in named(group):
        matrices_of(
            tuple(parameter.shape), rule_for(label, tuple(parameter.shape), group["split"]), name=label
        )
        placements = getattr(parameter, "placements", ())
        if any(isinstance(placement, Partial) for placement in placements):
            raise ValueError(
                f"{name}: a parameter of shape {tuple(parameter.shape)} lies as {shown(placements)}, and its values are sums over "
                "ranks: redistribute it to Shard or Replicate, then make the optimizer"
            )


def _check_transform(name: str, group: Group, defaults: Group) -> None:
    """ValueError for what is no function, and for another iteration than the usual beside one, which would not be made.

    A group that has a function where the optimizer has none may inherit the options of an iteration: they are for the others.
    """
    function = group[TRANSFORM]
    check_function(name, function)
    if function is None:
        return
    usual = {"ns_coefficients": DEFAULT_SET, "ns_steps": DEFAULT_STEPS}
    if _iteration_of(group) != _iteration_of(defaults if defaults[TRANSFORM] is None else usual):
        raise ValueError(
            f"{name}: ns_steps {group['ns_steps']!r} and ns_coefficients {group['ns_coefficients']!r} are of Newton-Schulz, and {TRANSFORM} "
            f"{name_of(function)} takes its place: leave them out, or give {TRANSFORM}=None"
        )


def _iteration_of(group: Mapping[str, Any]) -> tuple[Coefficients, int]:
    return coefficients_of(group["ns_coefficients"]), group["ns_steps"]
