"""What every optimizer refuses, with what was given, what is expected and what to change."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hp_dtensor.module_tensors import REPLACED
from hp_optim.pieces import local_of
from hp_platform.platform import Platform

SUCCESSOR = "_hp_fsdp_successor"
"""Attribute of a parameter from before ``fully_shard``, whose place a sharded one has taken since."""
PARAMS = "params"
NAMES = "param_names"
_TAGS = frozenset({PARAMS, NAMES, "name", "initial_lr", "step"})
"""Keys of groups that are no hyperparameters of an algorithm."""
_OTHER_NAMES = {"ns_variant": "ns_coefficients"}
"""What others call a hyperparameter, and its name here."""


def check_parameter(platform: Platform, optimizer: str, where: str, parameter: Any) -> None:
    """ValueError for what cannot be optimized; ``where`` says which of the given ones it is."""
    if not platform.is_tensor(parameter):
        kind = type(parameter)
        raise ValueError(
            f"{optimizer}: {where} is a {kind.__module__}.{kind.__qualname__}; parameters are tensors of the one framework of this "
            f"process, {platform.platform_type.value}: give model.parameters() or model.named_parameters() of a model made with it"
        )
    shape = tuple(parameter.shape)
    if getattr(parameter, SUCCESSOR, None) is not None:
        raise ValueError(
            f"{optimizer}: {where}, of shape {shape}, is a parameter from before fully_shard, which the model does not use any more: "
            "make the optimizer after fully_shard, from model.parameters() as they are then"
        )
    if not platform.is_floating(parameter.dtype):
        raise ValueError(
            f"{optimizer}: {where}, of shape {shape}, has dtype {parameter.dtype}; optimizers update floating-point parameters: leave "
            "it out, or register it as a buffer"
        )
    if not platform.is_leaf(local_of(parameter)):
        raise ValueError(
            f"{optimizer}: {where}, of shape {shape}, was made by an operation and gathers no gradient: give the parameter that it was "
            "made from"
        )


def check_current(
    optimizer: str,
    groups: Sequence[Mapping[str, Any]],
    gradient_of: Callable[[Any], Any],
    names: Mapping[str, Any] | None = None,
) -> None:
    """ValueError for a parameter whose place in the model another one has taken since the optimizer was made: it would train nothing.

    ``names``: the parameters by names, where the groups have none. Attributes alone are looked at, which are the same on all ranks. What
    is replaced in one place may be used in another, as by a head that was tied to what ``parallelize_module`` has cut, so a
    parameter that it has replaced is refused only without a gradient.
    """
    for number, group in enumerate(groups):
        for place, parameter in enumerate(group[PARAMS]):
            if getattr(parameter, SUCCESSOR, None) is not None:
                by: Any = "fully_shard"
            else:
                by = getattr(parameter, REPLACED, None)
                if by is None or gradient_of(parameter) is not None:
                    continue
            known = (name for name, each in (names or {}).items() if each is parameter)
            name = group[NAMES][place] if NAMES in group else next(known, None)
            at = f"{place} of group {number}" if len(groups) > 1 else f"{place}"
            where = f"parameter {at if name is None else repr(name)}"
            raise ValueError(
                f"{optimizer}.step: {where}, of shape {tuple(parameter.shape)}, is a parameter from before {by}, which the model does not "
                f"use any more, so a step would train nothing: make the optimizer after {by}, from model.parameters() as they are then"
            )


def check_unknown(optimizer: str, unknown: Mapping[str, Any], known: Iterable[str]) -> None:
    """ValueError that lists keyword arguments which the optimizer does not have, and those that it has."""
    if unknown:
        raise ValueError(
            f"{optimizer} has no {', '.join(sorted(map(repr, unknown)))}; it takes {', '.join(sorted(known))}: remove or rename what it "
            f"does not take{names_here(unknown, known)}"
        )


def names_here(unknown: Iterable[str], known: Iterable[str]) -> str:
    """For the end of an error: which of the unknown names has another one here."""
    names = frozenset(known)
    found = [
        f"{key!r} is {_OTHER_NAMES[key]!r} here" for key in sorted(unknown) if _OTHER_NAMES.get(key) in names
    ]
    return f". {', '.join(found)}" if found else ""


def check_keys(optimizer: str, group: Mapping[str, Any], known: Iterable[str]) -> None:
    """ValueError for a key that looks like a misspelt hyperparameter. Keys of the caller's own are legal."""
    names = sorted(known)
    for key in group:
        if key in names or key in _TAGS or not isinstance(key, str):
            continue
        other = _OTHER_NAMES.get(key)
        near = [other] if other in names else difflib.get_close_matches(key, names, 1, 0.8)
        if near:
            raise ValueError(
                f"{optimizer}: a group has the key {key!r}, which is no hyperparameter and would be ignored; did you mean {near[0]!r}? "
                f"Hyperparameters are {', '.join(names)}"
            )


def check_number(
    optimizer: str, name: str, value: Any, *, low: float = 0.0, below: float = math.inf, advice: str
) -> None:
    """ValueError unless ``low <= value < below``; NaN never is. ``value`` is a plain number."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not low <= value < below
        or math.isinf(value)
    ):
        room = f"at least {low:g}" if math.isinf(below) else f"at least {low:g} and below {below:g}"
        raise ValueError(f"{optimizer}: {name} is {value!r}; it must be a finite number, {room}: {advice}")


def check_learning_rate(platform: Platform, optimizer: str, lr: Any) -> None:
    """ValueError unless it is a number >= 0 or a tensor of one element, whose value is not looked at: that would wait for its device."""
    if platform.is_tensor(lr):
        if math.prod(tuple(lr.shape)) != 1:
            raise ValueError(
                f"{optimizer}: lr is a tensor of shape {tuple(lr.shape)}; as a tensor it has one element: use one group per learning rate"
            )
        return
    check_number(optimizer, "lr", lr, advice="give a learning rate such as 1e-3, or a tensor of one element")
