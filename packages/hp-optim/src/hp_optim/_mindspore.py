"""The ground of optimizers on MindSpore, whose own keep no groups and no state by parameter: the surface of torch's class."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from hp_optim.checks import NAMES, PARAMS


class Optimizer:
    """Groups, state, and both as a dict."""

    def __init__(self, params: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        self.defaults = defaults
        self.param_groups: list[dict[str, Any]] = []
        self.state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for group in params:
            self.add_param_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One more; it has been checked."""
        self.param_groups.append(param_group)

    def state_dict(self) -> dict[str, Any]:
        """``{"state": {number: entry}, "param_groups": [...]}`` with numbers in place of parameters; tensors are not copied."""
        numbers = {id(p): n for n, p in enumerate(p for group in self.param_groups for p in group[PARAMS])}
        groups = [
            {
                **{key: value for key, value in group.items() if key != PARAMS},
                PARAMS: [numbers[id(p)] for p in group[PARAMS]],
            }
            for group in self.param_groups
        ]
        state = {numbers[id(p)]: entry for p, entry in self.state.items() if id(p) in numbers}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take groups and state of a dict that :meth:`state_dict` made; values are copied.

        ValueError if it has other numbers of groups or parameters; nothing has changed then.
        """
        given = state_dict["param_groups"]
        have = [len(group[PARAMS]) for group in self.param_groups]
        found = [len(group[PARAMS]) for group in given]
        if have != found:
            raise ValueError(
                f"the state dict has groups of {found} parameters, the optimizer of {have}: make the optimizer of the parameters that "
                "it had when the dict was made"
            )
        groups = []
        state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for own, other in zip(self.param_groups, given, strict=True):
            taken = copy.deepcopy({key: value for key, value in other.items() if key != PARAMS})
            if NAMES in own:
                taken.setdefault(NAMES, own[NAMES])
            groups.append({**taken, PARAMS: own[PARAMS]})
            for number, parameter in zip(other[PARAMS], own[PARAMS], strict=True):
                if number in state_dict["state"]:
                    state[parameter] = self._loaded(own, parameter, state_dict["state"][number])  # type: ignore[attr-defined]
        self.__setstate__({"state": state, "param_groups": groups})

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "state": self.state, "param_groups": self.param_groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
