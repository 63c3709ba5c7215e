"""One parameter of a group: what this rank updates of it, and its state."""

from __future__ import annotations

from operator import is_
from typing import Any

from hp_optim.adamw.kernel import moments, state_dtype
from hp_optim.adamw.replicas import Division
from hp_optim.base import gradient_of, own_gradient
from hp_optim.groups import Group
from hp_optim.offload.home import StateHome
from hp_optim.pieces import like, local_of, placed
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor

MISSED = "missed"
"""Key of a state: in how many steps of the group the parameter had no gradient; not there if in none. Fewer than none: it came from
an optimizer that counts by parameter, which had made more steps than the group."""
FOREIGN_STEP = "step"
"""Key under which torch's optimizers count by parameter."""


class Member:
    """A parameter, and (with a ``division``) the piece of it that this replica updates."""

    def __init__(
        self, platform: Platform, parameter: Any, state: Any, division: Division | None, home: StateHome
    ) -> None:
        self.platform = platform
        self.home = home
        self.parameter = parameter
        self.state = state
        self.division = division
        self.device = platform.device_of(local_of(parameter))
        self._known: tuple[Any, ...] = ()
        """The moments that were found as they must be."""

    def target(self) -> Tensor:
        """What is updated: the local tensor, or a piece of it."""
        local = local_of(self.parameter)
        return local if self.division is None else self.division.piece(local)

    def gradient(self) -> Tensor | None:
        """The local gradient of :meth:`target`; None if there is none.

        Communication: none, unless a ``main_grad`` lies otherwise than the parameter; see :func:`hp_optim.base.own_gradient`.
        """
        found = gradient_of(self.parameter)
        if found is None:
            return None
        if getattr(found, "is_sparse", False):
            raise ValueError(
                f"AdamW: the gradient of a parameter of shape {tuple(self.parameter.shape)} is sparse, and moments of all elements would "
                "change: make the embedding with sparse=False"
            )
        local = own_gradient("AdamW", self.parameter, found)
        return local if self.division is None else self.division.piece(local)

    def entry(self, group: Group, gradient: Tensor) -> dict[str, Any]:
        """The state, made with the first gradient. ``group["step"]`` counts the running step already.

        Communication: none, unless state came from elsewhere and lies otherwise; see :meth:`_taken_over`.
        """
        keys, known = moments(group), self._known
        entry = self.state.get(self.parameter)
        if entry:
            if len(keys) != len(known) or not all(map(is_, map(entry.get, keys), known)):
                self._taken_over(group, entry)
            return entry
        entry = self.state[self.parameter]
        target, platform = self.target(), self.platform
        for key in keys:
            dtype = state_dtype(platform, target, gradient)
            entry[key] = self.placed(self.home.zeros(tuple(target.shape), dtype, self.device))
        if group["step"] > 1:
            entry[MISSED] = group["step"] - 1
        self._known = tuple(entry[key] for key in keys)
        return entry

    def placed(self, local: Tensor) -> Any:
        """A tensor like :meth:`target` as state shows it: a DTensor for a DTensor."""
        return placed(self.parameter, local, None if self.division is None else self.division.placements)

    def count_a_miss(self) -> None:
        """The group makes a step without this parameter."""
        entry = self.state.get(self.parameter)
        if entry:
            entry[MISSED] = entry.get(MISSED, 0) + 1
            if entry[MISSED] == 0:
                del entry[MISSED]

    def _taken_over(self, group: Group, entry: dict[str, Any]) -> None:
        """State that somebody has put there lies as it must: placed as :meth:`placed` says, in the memory of the home, and counted by
        the group.

        Communication: where state is placed otherwise, its redistribution, on all ranks alike.
        """
        platform, parameter = self.platform, self.parameter
        if FOREIGN_STEP in entry:
            missed = group["step"] - 1 - foreign_count(platform, entry)
            del entry[FOREIGN_STEP]
            entry.pop(MISSED, None)  # counted since it was put there
            if missed:
                entry[MISSED] = missed
        if group["amsgrad"] and moments(group)[2] not in entry:  # switched on since
            self.home.landed()
            entry[moments(group)[2]] = self.placed(platform.clone(local_of(entry[moments(group)[1]])))
        wanted = None
        if hasattr(parameter, "placements"):
            wanted = parameter.placements if self.division is None else self.division.placements
        for key in moments(group):
            value = entry[key]
            if (
                wanted is not None
                and hasattr(value, "placements")
                and tuple(value.placements) != tuple(wanted)
            ):
                entry[key] = value = self._replaced(value)
            local, own = local_of(value), local_of(parameter).dtype
            if platform.itemsize(local.dtype) < platform.itemsize(own):  # of a run in another precision
                self.home.landed()
                local = platform.cast(local, own)
                entry[key] = value = like(value, local)
            settled = self.home.settled(local, self.device)
            if settled is not local:
                entry[key] = like(value, settled)
        self._known = tuple(entry[key] for key in moments(group))

    def _replaced(self, value: Any) -> Any:
        self.home.landed()
        if self.division is not None and tuple(value.placements) == tuple(self.parameter.placements):
            return self.placed(self.platform.clone(self.division.piece(local_of(value))))
        wanted = self.parameter.placements if self.division is None else self.division.placements
        # Ranks exchange what is on their devices.
        on_device = like(value, self.platform.to_device(local_of(value), self.device))
        return on_device.redistribute(placements=wanted)


def foreign_count(platform: Platform, entry: dict[str, Any]) -> int:
    """How many steps another optimizer has counted for the parameter."""
    count = entry[FOREIGN_STEP]
    return int(platform.to_numpy(count).item()) if platform.is_tensor(count) else int(count)


def count_of(group: Group, entry: dict[str, Any]) -> int:
    """Which step this is for the parameter."""
    return int(group["step"]) - int(entry.get(MISSED, 0))
