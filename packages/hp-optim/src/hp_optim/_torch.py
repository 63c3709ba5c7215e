"""The ground of optimizers on PyTorch: ``torch.optim.Optimizer``, so that schedulers, GradScaler and DCP know them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hp_optim.checks import PARAMS


class Optimizer(torch.optim.Optimizer):
    """What torch's class does otherwise than the optimizers here.

    [Note: state that is loaded] torch's own ``load_state_dict`` casts state to the dtype of the parameter, which would round the float32
    state of a bfloat16 one, moves all of it to the parameter's device, which may have no room for it, and shares memory with
    the dict where it does neither. So it gets a dict without the state of parameters, and that is taken when it gives
    the optimizer what it has made of the rest, before the hooks that look at the result.
    """

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take groups and state of a dict that :meth:`state_dict` made; values are copied, and keep their dtypes."""

        def look(_: Any, given: dict[str, Any]) -> dict[str, Any]:
            numbers = [number for group in given["param_groups"] for number in group[PARAMS]]
            state = given["state"]
            self._loading = numbers, state
            return {**given, "state": {key: state[key] for key in state if key not in numbers}}

        # Last of the hooks, so that it sees what the others have made of the dict.
        handle = self.register_load_state_dict_pre_hook(look)
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            handle.remove()
            self.__dict__.pop("_loading", None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See [Note: state that is loaded]."""
        super().__setstate__(state)
        numbers, given = self.__dict__.pop("_loading", ((), {}))
        found = iter(numbers)
        for group in self.param_groups:
            for parameter in group[PARAMS]:
                number = next(found, None)
                if number is not None and number in given:
                    self._entries[parameter] = self._loaded(group, parameter, given[number])
