"""What is dropped while a side stream works for it: after an exception, by a user who changed plans, by a collector of garbage.

[Note: dropped in the middle] Memory of a device goes back to the stream that it was taken on, and is free for what that stream does
next. Ordinarily whoever lets a side stream work in it makes that stream wait before the memory goes. Who is dropped before has waited for
nothing: so its ``__del__`` makes the stream wait that the memory belongs to, on the device, and nobody gets memory in which a side stream
still works. That happens in any thread, whatever stream is current there; the host waits for nothing. When the process ends, or the
device has failed, there is no memory to save, and nobody to tell of an error: these functions raise none.
"""

from __future__ import annotations

from contextlib import suppress

from hp_platform.protocols.device import Event, Stream


def wait_for_event(owner: Stream, event: Event) -> None:
    """``owner``, the stream that the memory belongs to, waits for an event of another stream."""
    with suppress(Exception):
        owner.wait_event(event)


def wait_for_stream(owner: Stream, side: Stream) -> None:
    """``owner`` waits for all that ``side`` holds now: where an exception came before an event could be recorded."""
    with suppress(Exception):
        owner.wait_stream(side)
