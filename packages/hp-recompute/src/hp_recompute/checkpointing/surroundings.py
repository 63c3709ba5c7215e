"""What a function's result depends on beside its arguments: random numbers and the framework's modes, as they are now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from hp_platform import default_random_stream
from hp_platform.platform import Platform


class Surroundings:
    """Taken when a function begins; :meth:`restored` brings them back for another run, and leaves everything as it was.

    They are the framework's generators of the cpu and of ``devices``, the library's own stream of random operations, and
    casts that the framework does by itself (autocast).
    """

    def __init__(self, platform: Platform, devices: Sequence[str], *, keeps_random: bool) -> None:
        """``keeps_random`` False: the second run may draw other numbers than the first (which is right if it draws none)."""
        self.platform = platform
        self._devices = sorted({"cpu", *devices}) if keeps_random else []
        self._states = self._generators()
        self._stream = default_random_stream().get_state() if keeps_random else None
        self._casts = platform.autocast_state()

    def _generators(self) -> list[Any]:
        return [self.platform.get_rng_state(device) for device in self._devices]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The surroundings of the first run. What the generators have drawn since counts again afterwards."""
        with ExitStack() as stack:
            before = self._generators()
            stack.callback(self._put_back, before)
            self._put_back(self._states)
            if self._stream is not None:
                stack.enter_context(default_random_stream().at(self._stream))
            stack.enter_context(self._casts())
            yield

    def _put_back(self, states: Sequence[Any]) -> None:
        for device, state in zip(self._devices, states, strict=True):
            self.platform.set_rng_state(state, device)
