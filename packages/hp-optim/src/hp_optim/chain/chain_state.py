"""``chain.state``: the state of all optimizers of a chain under their parameters."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from hp_optim.checks import PARAMS


class ChainState(MutableMapping[Any, dict[str, Any]]):
    """Parameter -> state, read from and written to the optimizer that has the parameter in a group.

    KeyError for a parameter without state. Looking something up makes nothing, unlike with the ``state`` of one optimizer.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers

    def owner_of(self, parameter: Any) -> Any:
        """The optimizer that has it. KeyError if none has."""
        for optimizer in self._optimizers:
            if any(parameter is each for group in optimizer.param_groups for each in group[PARAMS]):
                return optimizer
        raise KeyError(f"no optimizer of the chain has this parameter, of shape {tuple(parameter.shape)}")

    def __getitem__(self, parameter: Any) -> dict[str, Any]:
        for optimizer in self._optimizers:
            if parameter in optimizer.state:
                entry: dict[str, Any] = optimizer.state[parameter]
                return entry
        raise KeyError(parameter)

    def __setitem__(self, parameter: Any, entry: dict[str, Any]) -> None:
        self.owner_of(parameter).state[parameter] = entry

    def __delitem__(self, parameter: Any) -> None:
        for optimizer in self._optimizers:
            if parameter in optimizer.state:
                del optimizer.state[parameter]
                return
        raise KeyError(parameter)

    def __iter__(self) -> Iterator[Any]:
        for optimizer in self._optimizers:
            yield from optimizer.state

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)
