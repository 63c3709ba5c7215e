"""The ground of optimizers on PyTorch: ``torch.optim.Optimizer``, so that schedulers, GradScaler and DCP know them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hp_optim.checks import PARAMS


class Optimizer(torch.optim.Optimizer):
    """What torch's class does otherwise than the optimizers here."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take groups and state of a dict that :meth:`state_dict` made; values are copied, and keep their dtypes.

        torch's own casts state to the dtype of the parameter, which would round the float32 state of a bfloat16 one, and
        shares memory with the dict where nothing is cast.
        """
        final: dict[str, Any] = {}

        def look(_: Any, given: dict[str, Any]) -> None:
            final.update(given)

        # Last of the hooks, so that it sees what the others have made of the dict.
        handle = self.register_load_state_dict_pre_hook(look)
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            handle.remove()
        numbers = [number for group in final["param_groups"] for number in group[PARAMS]]
        parameters = [parameter for group in self.param_groups for parameter in group[PARAMS]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in final["state"]:
                self.state[parameter] = self._loaded(parameter, final["state"][number])
        self._forget_plans()
