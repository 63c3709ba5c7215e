"""Hooks of sharded parameters that run when their gradients have been reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class GradientHooks:
    """What a user has registered with ``register_post_accumulate_grad_hook`` on a sharded parameter.

    Autograd knows nothing of gradients of shards, so the reduction calls them, behind what it has added to ``.grad``: on the
    stream of reductions, in the order of registration. The values are there for what a hook launches.
    """

    def __init__(self) -> None:
        self.hooks: dict[int, Callable[[Any], None]] = {}
        """By number."""
        self._number = 0

    def add(self, hook: Callable[[Any], None]) -> HookOfGradient:
        """Take one more."""
        self._number = self._number + 1
        self.hooks[self._number] = hook
        return HookOfGradient(self.hooks, self._number)

    def run(self, parameter: Any) -> None:
        """Call them with the sharded parameter."""
        for hook in tuple(self.hooks.values()):
            hook(parameter)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.hooks)

    def __reduce__(self) -> Any:
        """Hooks stay where they are: a pickled or copied parameter has none."""
        return (GradientHooks, ())


class HookOfGradient:
    """The handle of a registered hook."""

    def __init__(self, hooks: dict[int, Callable[[Any], None]], number: int) -> None:
        self._hooks = hooks
        self._number = number

    def remove(self) -> None:
        """Take the hook away; again: nothing."""
        self._hooks.pop(self._number, None)
