"""The state of optimizers as one flat dict, the form in which torch.distributed.checkpoint keeps it, and back.

``state.<name of the parameter>.<key>`` and ``param_groups.<name of the parameter>.<hyperparameter>``: every parameter has the
hyperparameters of its group, so that groups may be cut otherwise at the next start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hp_optim.checks import PARAMS
from hp_platform.platform import Platform

STATE: Final = "state"
GROUPS: Final = "param_groups"


def flattened(nested: Mapping[str, Any]) -> dict[str, Any]:
    """The flat form of ``{"state": {name: entry}, "param_groups": [...]}``. Values are the same objects."""
    flat = {
        f"{STATE}.{name}.{key}": value
        for name, entry in nested[STATE].items()
        for key, value in entry.items()
    }
    for group in nested[GROUPS]:
        for name in group[PARAMS]:
            flat.update({f"{GROUPS}.{name}.{key}": value for key, value in group.items() if key != PARAMS})
    return flat


def is_flat(state_dict: Mapping[str, Any]) -> bool:
    """Whether it has the flat form; an empty dict has."""
    return not {STATE, GROUPS} <= set(state_dict)


def unflattened(
    platform: Platform, flat: Mapping[str, Any], groups: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """The nested form, in the given groups of names. Names that are in none of them get a group each.

    ValueError for keys of another form, and where the parameters of a group differ in a hyperparameter.
    """
    state: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        part, _, rest = str(key).partition(".")
        name, _, last = rest.rpartition(".")
        if part not in (STATE, GROUPS) or not name:
            raise ValueError(
                f"the state dict has the key {key!r}; flat keys are 'state.<parameter>.<key>' and "
                "'param_groups.<parameter>.<hyperparameter>': give what state_dict() of a chain made"
            )
        (state if part == STATE else settings).setdefault(name, {})[last] = value
    known = [[name for name in names if name in settings] for names in groups]
    grouped = {name for names in known for name in names}
    known.extend([name] for name in (*settings, *state) if name not in grouped)
    made = []
    for names in filter(None, known):
        first = settings.get(names[0], {})
        for name in names[1:]:
            _check_equal(platform, names[0], first, name, settings[name])
        made.append({PARAMS: names, **first})
    return {STATE: state, GROUPS: made}


def _check_equal(
    platform: Platform, name: str, values: Mapping[str, Any], other: str, others: Mapping[str, Any]
) -> None:
    for key in {**values, **others}:
        mine, theirs = values.get(key), others.get(key)
        if _plain(platform, mine) != _plain(platform, theirs):
            raise ValueError(
                f"{name} and {other} are in one group of the optimizer, and have {key} {mine!r} and {theirs!r} in the state dict: make "
                "groups in which they are apart, as when it was saved"
            )


def _plain(platform: Platform, value: Any) -> Any:
    """A hyperparameter that can be compared: tensors of one element are numbers, lists are tuples."""
    if platform.is_tensor(value):
        return platform.to_numpy(platform.detach(value)).tolist()
    return tuple(value) if isinstance(value, list) else value
