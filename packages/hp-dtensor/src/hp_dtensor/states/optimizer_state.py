"""State of optimizers by the names of parameters, read and given back.

An optimizer is any object with ``param_groups`` (dicts with ``"params"`` and hyperparameters) and ``state`` (parameter ->
dict), as torch.optim's are. Nothing else of it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_dtensor.states.broadcast import agree, announce, home_of
from hp_dtensor.states.optimizer_loading import GROUPS, STATE, Loading, dtype_classes, flat, is_function
from hp_dtensor.states.optimizer_names import PARAM_NAMES, PARAMS, NamedOptimizer, check_flat
from hp_dtensor.states.options import IncompatibleKeys, StateDictOptions, refuse_names
from hp_dtensor.states.values import is_frozen, read
from hp_platform.platform import Platform


def read_optimizer(platform: Platform, named: NamedOptimizer, options: StateDictOptions) -> dict[str, Any]:
    """``{"state": {name: {key: value}}, "param_groups": [{"params": [names], ...}]}``. Reading changes nothing.

    Hyperparameters that are functions are left out, since they cannot be kept; dtypes come by their names.

    Communication: none for shards; for whole tensors one all-gather of each one's bytes over the mesh dims that cut it.
    """
    keeps = True
    if options.full_state_dict and options.cpu_offload:
        keeps = home_of(platform, named.parameters.values()).is_source

    def values_of(where: str, found: Mapping[str, Any]) -> dict[str, Any]:
        for key, value in found.items():
            check_flat(platform, f"{where}/{key}", value)
        return {key: read(platform, value, options, keeps=keeps) for key, value in found.items()}

    state: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for number, (owner, group) in enumerate(named.groups):
        names = [named.name_of(parameter) for parameter in group[PARAMS]]
        if options.ignore_frozen_params:
            names = [name for name in names if not is_frozen(named.parameters, name)]
        groups.append({PARAMS: names, **values_of(f"{GROUPS}/{number}", _hyperparameters(platform, group))})
        for name in names:
            # get: the state may be a dict that makes what is asked for.
            entry = owner.state.get(named.parameters[name])
            if entry:
                state[name] = values_of(name, entry)
    return {STATE: state, GROUPS: groups} if keeps else {}


def _hyperparameters(platform: Platform, group: Mapping[str, Any]) -> dict[str, Any]:
    """What can be kept of a group, without its parameters."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, dtype_classes(platform)):
            found[key] = platform.dtype_name(value)
        elif key not in (PARAMS, PARAM_NAMES) and not is_function(platform, value):
            found[key] = value
    return found


def load_optimizer(
    platform: Platform,
    named: NamedOptimizer,
    state_dict: Mapping[str, Any],
    options: StateDictOptions,
    *,
    what: str,
) -> IncompatibleKeys:
    """Write what :func:`read_optimizer` has made, at any number of ranks; return missing and unexpected names of parameters.

    Everything is checked before anything is written. ``what`` names the call in the errors of other ranks. Communication:
    what the redistribution of DTensors in other placements needs; with ``broadcast_from_rank0`` one broadcast of each value.
    """
    home = home_of(platform, named.parameters.values()) if options.broadcast_from_rank0 else None
    mine: dict[tuple[Any, ...], Any] = {}
    problem: Exception | None = None
    try:
        if home is None or home.is_source:
            mine = flat(platform, state_dict)
    except Exception as error:
        if home is None:
            raise
        problem = error  # told to the others before it is raised, who would wait for this rank
    loading = Loading(platform, named, mine if home is None else announce(platform, mine, home, problem))
    names = loading.compared(ignore_frozen=options.ignore_frozen_params)
    try:
        if problem is None and options.strict:
            refuse_names(
                f"the optimizer of {named.model_name}",
                names,
                "make the optimizer of the parameters that it had",
            )
        loading.check()
    except (ValueError, RuntimeError) as error:
        if home is None:
            raise
        problem = problem or error
    if home is not None:
        agree(problem, home, what)
    loading.load(mine, home)
    return names
