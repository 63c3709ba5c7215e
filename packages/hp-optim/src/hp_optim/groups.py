"""What a caller may give as ``params``, and the groups that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_optim.checks import NAMES, PARAMS, check_parameter
from hp_platform.platform import Platform

Group = dict[str, Any]


def groups_of(platform: Platform, optimizer: str, params: Any) -> list[Group]:
    """Groups, each with a list of parameters, and with their names where (name, parameter) pairs were given.

    ``params``: an iterable of parameters, of pairs, or of groups (dicts whose ``"params"`` is a parameter or an iterable of
    parameters or pairs, and whose other keys overrule the defaults). ValueError for anything else, and for no parameters at all.
    """
    if platform.is_tensor(params) or isinstance(params, (str, bytes, Mapping)):
        raise ValueError(
            f"{optimizer}: params is a {type(params).__name__}; it is an iterable of parameters, of (name, parameter) pairs, or of dicts "
            "with 'params': put it into a list"
        )
    try:
        given = list(params)
    except TypeError:
        raise ValueError(
            f"{optimizer}: params is a {type(params).__name__}, which is not iterable: give model.parameters()"
        ) from None
    if not given:
        raise ValueError(
            f"{optimizer}: params is empty; an optimizer has at least one parameter: a generator that was used up before is empty too, "
            "give model.parameters() anew"
        )
    if not any(isinstance(each, Mapping) for each in given):
        return [group_of(platform, optimizer, {PARAMS: given})]
    wrong = [number for number, each in enumerate(given) if not isinstance(each, Mapping)]
    if wrong:
        raise ValueError(
            f"{optimizer}: params has groups (dicts) and, at {wrong[0]}, a {type(given[wrong[0]]).__name__}: give groups only, or "
            "parameters only"
        )
    return [group_of(platform, optimizer, each, f"group {number}: ") for number, each in enumerate(given)]


def group_of(platform: Platform, optimizer: str, given: Any, what: str = "") -> Group:
    """One group, normalised; the caller's dict is not changed."""
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{optimizer}: a group is a dict with 'params', got a {type(given).__name__}: give dict(params=[...])"
        )
    if PARAMS not in given:
        raise ValueError(
            f"{optimizer}: {what}a group needs 'params', its keys are {sorted(map(str, given))}: add params=[...]"
        )
    params = given[PARAMS]
    if isinstance(params, (set, frozenset)):
        raise ValueError(
            f"{optimizer}: {what}'params' is a set, whose order differs from run to run and from rank to rank: give a list"
        )
    listed = [params] if platform.is_tensor(params) else list(params)
    named = [isinstance(each, tuple) for each in listed]
    if any(named) and not all(named):
        raise ValueError(
            f"{optimizer}: {what}some parameters come as (name, parameter) pairs and some alone: give all of them in one way"
        )
    group = dict(given)
    if any(named):
        wrong = [pair for pair in listed if len(pair) != 2 or not isinstance(pair[0], str)]
        if wrong:
            raise ValueError(
                f"{optimizer}: {what}a pair is (name, parameter), got a tuple of {len(wrong[0])} entries: give model.named_parameters()"
            )
        group[NAMES] = [name for name, _ in listed]
        listed = [parameter for _, parameter in listed]
    group[PARAMS] = listed
    for place, parameter in enumerate(listed):
        names = group.get(NAMES)
        shown = f"parameter {names[place]!r}" if names is not None else f"parameter {place}"
        check_parameter(platform, optimizer, what + shown, parameter)
    if len({id(parameter) for parameter in listed}) < len(listed):
        raise ValueError(
            f"{optimizer}: {what}a parameter stands there twice and would be updated twice in a step: list every parameter once"
        )
    return group
