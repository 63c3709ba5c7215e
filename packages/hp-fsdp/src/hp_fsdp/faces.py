"""What stands in the places of a unit's parameters, kept from step to step.

[Note: the host's time] A step with few samples is as long as the host takes to ask for it, so what a unit does at every step is done
for all of its parameters at once, with what was looked up before. Lists that are kept here hold until something is exchanged:
then the parameter says so (:meth:`Faces.forget`), and they are made anew, parameter by parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

from hp_dtensor import DTensor
from hp_dtensor.dtensor import local_tensors
from hp_platform.platform import Platform

if TYPE_CHECKING:
    from hp_fsdp.parameter import ManagedParameter

Place = tuple[Callable[[Any], None], Any]
"""What puts something there, and what to put."""


class Faces:
    """Of one unit; its parameters hold it, too."""

    __slots__ = (
        "_fulls",
        "_gets",
        "_parameters",
        "_platform",
        "_shards",
        "_trains",
        "_wholes",
        "dtensors",
        "locals",
    )

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.dtensors: list[DTensor] = []
        """Whole parameters that have been shown as such: see :func:`hp_dtensor.marks.forget_marks`."""
        self.forget()

    def forget(self) -> None:
        """A parameter, its whole tensor or one of its places is another one."""
        self._wholes: list[Place] | None = None
        self._shards: list[Place] | None = None
        self._gets: list[Callable[[], Any]] | None = None
        self._parameters: list[Any] = []
        self.locals: list[Any] = []
        """The shards, at the last time that somebody asked whether all is as it was; empty: nobody has since it is not."""
        self._fulls: list[Any] = []
        self._trains: list[bool] = []
        """Which shards do, and which whole tensors."""

    # --- what the user has put there
    def remember(self, params: Sequence[ManagedParameter]) -> None:
        """All first places show the sharded parameters."""
        self._gets = [param.getter for param in params]
        self._parameters = [param.parameter for param in params]
        self.locals = local_tensors(self._parameters)

    def stand(self) -> bool:
        """Whether they do so still."""
        if self._gets is None or not all(map(is_, [get() for get in self._gets], self._parameters)):
            return False
        self.locals = local_tensors(self._parameters)
        return True

    # --- what the unit puts there
    def show_wholes(self, params: Sequence[ManagedParameter], listener: Any) -> None:
        """Whole parameters in all places; see :meth:`ManagedParameter.show_full`."""
        ask = self._platform.requires_grads
        shards = self.locals or local_tensors([param.parameter for param in params])
        if self._wholes is not None and ask([*shards, *self._fulls]) == self._trains:
            for put, whole in self._wholes:
                put(whole)
            return
        for param in params:
            param.show_full(listener)
        self._wholes = [(put, param.shown) for param in params for put in param.setters]
        self.dtensors = [param.shown for param in params if isinstance(param.shown, DTensor)]
        self._fulls = [param.full for param in params]
        trains = ask(shards)
        self._trains = [*trains, *trains]

    def show_shards(self, params: Sequence[ManagedParameter]) -> None:
        """Shards in all places."""
        if self._shards is None:
            self._shards = [(put, param.parameter) for param in params for put in param.setters]
        for put, parameter in self._shards:
            put(parameter)
