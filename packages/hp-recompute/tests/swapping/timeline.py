"""A device whose copies take time, for tests: what waits for what is written down, and when that would be is computed from it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from hp_platform.platform import Platform
from hp_recompute.swapping.late_copies import LateCopies
from hp_recompute.swapping.manager import SwapManager

OPERATIONS = 10
"""Of a layer; each saves as much as the others."""


class Timeline:
    """Of layers of ``forward`` milliseconds, and twice as many backward, which save what is copied in ``copy`` milliseconds."""

    def __init__(self, *, forward: float, copy: float, layer_nbytes: int, gradient_nbytes: int = 0) -> None:
        """``gradient_nbytes``: of the gradients that a layer's backward makes, which stay."""
        self.forward, self.copy = forward, copy
        self.layer_nbytes, self.gradient_nbytes = layer_nbytes, gradient_nbytes
        self.manager = SwapManager(copies=lambda platform, device: _Timed(platform, device, self))
        self.new_step()

    def new_step(self) -> None:
        """Nothing has happened."""
        self._log: list[tuple[str, Any, float]] = []
        self._sources: list[weakref.ref[Any]] = []
        self._gradients_nbytes = self.peak_nbytes = 0

    def computed(self, milliseconds: float) -> None:
        """The device has got so much to do."""
        self._log.append(("compute", None, milliseconds))

    def made_gradients(self) -> None:
        """Of one layer."""
        self._gradients_nbytes = self._gradients_nbytes + self.gradient_nbytes

    def in_use(self) -> int:
        """Bytes on the device."""
        nbytes = self.manager.device_nbytes + self._gradients_nbytes
        self.peak_nbytes = max(self.peak_nbytes, nbytes)
        return nbytes

    def copied(self, event: Any, nbytes: int) -> None:
        """From or to the device."""
        self._log.append(("copy", event, nbytes / self.layer_nbytes * self.copy))

    def left(self, sources: Sequence[Any]) -> None:
        """These are copied to the host."""
        self._sources.extend(map(weakref.ref, sources))

    @property
    def num_held(self) -> int:
        """Memories whose copies to the host were asked for, and which somebody holds on the device."""
        return sum(ref() is not None for ref in self._sources)

    def waited(self, event: Any) -> None:
        """The computation, for a copy."""
        self._log.append(("wait", event, 0.0))

    @property
    def milliseconds(self) -> tuple[float, float]:
        """Of the step: all of it, and those in which the device computed."""
        now = link = computed = 0.0
        done: dict[int, float] = {}
        for kind, event, milliseconds in self._log:
            if kind == "compute":
                now, computed = now + milliseconds, computed + milliseconds
            elif kind == "copy":
                link = max(link, now) + milliseconds
                done[id(event)] = link
            else:
                now = max(now, done.get(id(event), now))  # of a step before: it is over
        return now, computed


class _Timed(LateCopies):
    def __init__(self, platform: Platform, device: str, timeline: Timeline) -> None:
        super().__init__(platform, device)
        self._timeline = timeline

    def in_use(self) -> int:
        return self._timeline.in_use()

    def to_host(self, pairs: Sequence[tuple[Any, Any]], stream: Any = None) -> Any:
        event = super().to_host(pairs, stream)
        self._timeline.left([source for _, source in pairs])
        self._timeline.copied(event, sum(int(target.shape[0]) for target, _ in pairs))
        return event

    def to_device(self, pairs: Sequence[tuple[Any, Any]], stream: Any = None) -> Any:
        event = super().to_device(pairs, stream)
        self._timeline.copied(event, sum(int(target.shape[0]) for target, _ in pairs))
        return event

    def wait(self, event: Any) -> None:
        super().wait(event)
        self._timeline.waited(event)


def layer_of(platform: Platform, timeline: Timeline) -> Callable[[Any], Any]:
    """A function whose operations each save their argument."""

    class Operation(platform.Function):  # type: ignore[name-defined,misc]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            timeline.computed(timeline.forward / OPERATIONS)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            (x,) = ctx.saved_tensors
            timeline.computed(2 * timeline.forward / OPERATIONS)
            return gradient * 2 + x * 0

    class Gradients(platform.Function):  # type: ignore[name-defined,misc]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            timeline.made_gradients()
            return gradient * 1

    def layer(x: Any) -> Any:
        x = Gradients.apply(x)
        for _ in range(OPERATIONS):
            x = Operation.apply(x)
        return x

    return layer
