"""DTensors as parameters of MindSpore: ``mindspore.Parameter(dtensor)`` is both, and so are its copies."""

from __future__ import annotations

from typing import Any

import mindspore

from hp_dtensor.pickling import PickleMethods


class ParameterMethods(PickleMethods):
    """Copies that stay parameters."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = super().__deepcopy__(memo)
        if not isinstance(self, mindspore.Parameter):
            return made
        parameter = mindspore.Parameter(made, name=self.name, requires_grad=self.requires_grad)
        parameter.grad = made.grad if self.requires_grad else None
        memo[id(self)] = parameter
        return parameter

    def _attributes(self) -> dict[str, Any]:
        return {}  # MindSpore's own, which cannot be copied; a parameter's pickle is a DTensor
