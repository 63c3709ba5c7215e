"""``LRSchedulersContainer``: the schedules of all optimizers of a model as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class LRSchedulersContainer:
    """Schedulers by the names of their optimizers, stepped and saved together. Made by :func:`hp_optim.get_hyper_lr_scheduler`.

    Args:
        schedulers: name -> scheduler; anything with ``step``, ``get_last_lr``, ``state_dict`` and ``load_state_dict``.

    Iterating gives the schedulers; ``schedulers_dict`` has them by name. No communication: all ranks compute the same.
    ValueError for something else.
    """

    def __init__(self, schedulers: Mapping[str, Any]) -> None:
        if not isinstance(schedulers, Mapping):
            raise ValueError(
                f"schedulers is a {type(schedulers).__name__}; it is a dict from names of optimizers to their schedulers"
            )
        for name, scheduler in schedulers.items():
            lacks = [each for each in _SURFACE if not callable(getattr(scheduler, each, None))]
            if lacks:
                raise ValueError(
                    f"the scheduler {name!r}, a {type(scheduler).__name__}, has no {', '.join(lacks)}: give one of hp_optim or torch.optim"
                )
        self.schedulers_dict: dict[str, Any] = dict(schedulers)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.schedulers_dict.values())

    def __len__(self) -> int:
        return len(self.schedulers_dict)

    def step(self) -> None:
        """Go on to the next step: the learning rates of all optimizers. To be called after they have stepped."""
        for scheduler in self:
            scheduler.step()

    def get_last_lr(self) -> list[float]:
        """The present rates of all groups of all optimizers, in their order."""
        return [rate for scheduler in self for rate in scheduler.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        """Name of an optimizer -> state of its schedule."""
        return {name: scheduler.state_dict() for name, scheduler in self.schedulers_dict.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to the step that was saved; the present schedule counts, not the saved one, and a UserWarning tells of differences.

        The order of the names is free. RuntimeError for another number of names, or a missing one; nothing has changed then.
        """
        saved, own = list(state_dict), list(self.schedulers_dict)
        if len(saved) != len(own):
            raise RuntimeError(
                f"the state has {len(saved)} schedules ({', '.join(map(str, saved)) or 'none'}), this run {len(own)} "
                f"({', '.join(own) or 'none'}): make the same optimizers as the run that saved it"
            )
        missing = [name for name in own if name not in state_dict]
        if missing:
            raise RuntimeError(
                f"the state has no schedule for {', '.join(missing)}; it has those of {', '.join(map(str, saved))}: give the optimizers the "
                "names that they had when it was saved"
            )
        for name, scheduler in self.schedulers_dict.items():
            scheduler.load_state_dict(state_dict[name])


_SURFACE = ("step", "get_last_lr", "state_dict", "load_state_dict")
