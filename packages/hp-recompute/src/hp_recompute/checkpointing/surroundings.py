"""What a function's result depends on beside its arguments: random numbers and the framework's modes, as they are now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from hp_platform.platform import Platform
from hp_platform.random_stream import RandomStream, living_random_streams


@dataclass(frozen=True)
class Drawn:
    """How far random numbers have been drawn: states by device, and by stream."""

    generators: dict[str, Any]
    streams: dict[RandomStream, dict[str, int]]

    def __or__(self, other: Drawn) -> Drawn:
        return Drawn(self.generators | other.generators, self.streams | other.streams)


class Surroundings:
    """Taken when a function begins; :meth:`restored` brings them back for another run, and leaves everything as it was.

    They are the framework's generators of the cpu and of ``devices`` (the arguments'; if all of them lie on the cpu, of the accelerator
    in use, where what the function holds itself may lie), all streams of random operations that the process holds, and casts that
    the framework does by itself (autocast).
    """

    def __init__(self, platform: Platform, devices: Sequence[str], *, keeps_random: bool) -> None:
        """``keeps_random`` False: the second run may draw other numbers than the first (which is right if it draws none)."""
        self.platform = platform
        self._devices = sorted({"cpu", *devices, *_in_use(platform, devices)}) if keeps_random else []
        self._states = self._generators()
        streams = living_random_streams() if keeps_random else []
        self._streams = [(stream, stream.get_state()) for stream in streams]
        self._casts = platform.autocast_state()

    def _generators(self) -> list[Any]:
        return [self.platform.get_rng_state(device) for device in self._devices]

    def drawn(self) -> Drawn:
        """What generators and streams would give next, now."""
        streams = {stream: stream.get_state() for stream, _ in self._streams}
        return Drawn(dict(zip(self._devices, self._generators(), strict=True)), streams)

    def go_on_from(self, drawn: Drawn) -> None:
        """Inside of :meth:`restored`: as after something that is not done again."""
        for device in self._devices:
            if device in drawn.generators:
                self.platform.set_rng_state(drawn.generators[device], device)
        for stream, _ in self._streams:
            if stream in drawn.streams:
                stream.set_state(drawn.streams[stream])

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The surroundings of the first run. What the generators have drawn since counts again afterwards."""
        with ExitStack() as stack:
            before = self._generators()
            stack.callback(self._put_back, before)
            self._put_back(self._states)
            for stream, state in self._streams:
                stack.enter_context(stream.at(state))
            stack.enter_context(self._casts())
            yield

    def _put_back(self, states: Sequence[Any]) -> None:
        for device, state in zip(self._devices, states, strict=True):
            self.platform.set_rng_state(state, device)


def _in_use(platform: Platform, devices: Sequence[str]) -> list[str]:
    """The accelerator on which there is anything, if none of ``devices`` is on one. One that is not in use is not woken up."""
    kind = platform.device_types()[0]
    if kind == "cpu" or any(device != "cpu" for device in devices):
        return []
    handle = platform.device(kind)
    has_memory = platform.supports("memory_stats", kind) and handle.memory_allocated() > 0
    return [handle.current()] if has_memory else []
