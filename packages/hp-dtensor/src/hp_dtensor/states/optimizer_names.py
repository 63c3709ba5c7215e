"""An optimizer whose parameters have the names that they have in a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hp_platform.platform import Platform, require

PARAMS: Final = "params"
PARAM_NAMES: Final = "param_names"
"""Where a group keeps the names that its parameters were given with; a state by names has them as its ``params``."""
STEP: Final = "step"
"""Where optimizers count their steps, in a plain number."""


class NamedOptimizer:
    """One optimizer, or several (a list) that share a model. ValueError for what is none, and for parameters that are not the
    model's. An optimizer is any object with ``param_groups`` and ``state``, as torch.optim's have.
    """

    def __init__(
        self, platform: Platform, parameters: Mapping[str, Any], model_name: str, optimizer: Any
    ) -> None:
        optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        for each in optimizers:
            _check_optimizer(platform, each)
        self.model_name = model_name
        self.parameters: dict[str, Any] = dict(parameters)
        """By all names."""
        self._names: dict[int, str] = {}
        for name, parameter in self.parameters.items():
            self._names.setdefault(id(parameter), name)
        self.groups: list[tuple[Any, dict[str, Any]]] = [
            (each, group) for each in optimizers for group in each.param_groups
        ]
        """The optimizers' groups one after the other, each with its optimizer."""
        self.owners: dict[int, tuple[Any, dict[str, Any]]] = {}
        """Of the id of a parameter: its optimizer and its group."""
        for index, (owner, group) in enumerate(self.groups):
            for place, parameter in enumerate(group[PARAMS]):
                self._check_known(parameter, f"param_groups[{index}]['params'][{place}]")
                self.owners[id(parameter)] = (owner, group)

    def name_of(self, parameter: Any) -> str:
        """The first of its names in the model."""
        return self._names[id(parameter)]

    def names(self) -> list[str]:
        """Of all parameters that the optimizers have, in their order."""
        return [self.name_of(parameter) for _, group in self.groups for parameter in group[PARAMS]]

    def has(self, name: str) -> bool:
        """Whether it is a name, any of a tied one's, of a parameter that the optimizers have."""
        return name in self.parameters and id(self.parameters[name]) in self.owners

    def _check_known(self, parameter: Any, where: str) -> None:
        if id(parameter) not in self._names:
            raise ValueError(
                f"{where} of the optimizer, of shape {tuple(parameter.shape)}, is no parameter of {self.model_name}: make "
                "optimizers after fully_shard, from the parameters of this model, and read them outside of full_params"
            )


def check_flat(platform: Platform, where: str, value: Any) -> None:
    """ValueError for tensors inside of lists and dicts: they are of no one parameter, and nobody can tell how they lie."""
    if not platform.is_tensor(value) and _has_tensors(platform, value):
        raise ValueError(
            f"{where} of the optimizer is a {type(value).__name__} with tensors in it; what is kept are tensors and numbers by "
            "parameter: of such an optimizer (LBFGS is one) keep the state apart, on the ranks where it is"
        )


def _has_tensors(platform: Platform, value: Any) -> bool:
    if isinstance(value, (list, tuple, dict)):
        inside = value.values() if isinstance(value, dict) else value
        return any(_has_tensors(platform, each) for each in inside)
    return platform.is_tensor(value)


def _check_optimizer(platform: Platform, optimizer: Any) -> None:
    kind = type(optimizer)
    # The framework's own may have both attributes and keep its state elsewhere: then it would be lost without a word.
    if platform.is_module(optimizer) and kind.__module__.partition(".")[0] == platform.platform_type.value:
        require(platform, "optimizer_state", what=f"the state dict of {kind.__name__}")
    if hasattr(optimizer, "param_groups") and hasattr(optimizer, "state"):
        return
    raise ValueError(
        f"an optimizer has param_groups and state, as those of torch.optim have; got {kind.__name__}"
    )
